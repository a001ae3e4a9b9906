"""The catalogue of metrics that an engine exports, with their meanings.

Names are vLLM's (`vllm:...`), so that dashboards and routers made for vLLM work. Exported by
`actors/observability/telemetry.py`, where counters get `_total`, and all of them also by
`actors/observability/ray_metrics.py`. A test serves requests and finds a sample of every one.
`fleet_metrics.py` has those of gateways, batch jobs and the autoscaler.
"""

from __future__ import annotations

from .metric import HTTP_S, SHARED_LABELS, Metric, Unit
from .request_metrics import REQUEST_METRICS

# By tenant and category: name before "_by_", unit, meaning.
ACCOUNT_METRICS: tuple[tuple[str, Unit, str], ...] = (
    ("manta:generation_tokens", "tokens", "Generated tokens"),
    ("dflash:spec_drafts", "drafts", "Verified blocks"),
    ("dflash:spec_accepted", "tokens", "Accepted drafts"),
)

CATALOGUE: tuple[Metric, ...] = (
    *REQUEST_METRICS,
    # Speculation.
    Metric("vllm:spec_decode_num_drafts", "counter", "drafts", "Verified blocks (requests x steps)."),
    Metric("vllm:spec_decode_num_draft_tokens", "counter", "tokens", "Drafts that were verified."),
    Metric("vllm:spec_decode_num_accepted_tokens", "counter", "tokens", "Drafts that were accepted."),
    Metric(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "counter",
        "tokens",
        "Drafts that were accepted, by position in the block.",
        (*SHARED_LABELS, "position"),
    ),
    Metric(
        "vllm:spec_decode_mean_accepted_length",
        "gauge",
        "tokens",
        "Mean acceptance length since the start, including the bonus token; no value before the first draft.",
    ),
    Metric(
        "manta:spec_draft_tokens",
        "counter",
        "tokens",
        "Drafts that were verified, by the method that made them: the engine's, or suffix beside a drafter.",
        (*SHARED_LABELS, "method"),
    ),
    Metric(
        "manta:spec_accepted_tokens",
        "counter",
        "tokens",
        "Drafts that were accepted, by the method that made them.",
        (*SHARED_LABELS, "method"),
    ),
    Metric(
        "manta:drafter_skipped_passes",
        "counter",
        "steps",
        "Steps without the drafter's pass, because copies were expected to win for all requests.",
    ),
    Metric(
        "dflash:spec_proposed_tokens",
        "counter",
        "tokens",
        "Drafts that were made, verified or not.",
    ),
    Metric(
        "dflash:spec_trimmed_tokens",
        "counter",
        "tokens",
        "Drafts that were not verified, because their margins were too small to pay off.",
    ),
    Metric(
        "dflash:spec_branch_tokens",
        "counter",
        "tokens",
        "Drafts of trees that were verified besides the chains of best candidates.",
    ),
    Metric(
        "dflash:spec_accepted_branch_tokens",
        "counter",
        "tokens",
        "Drafts of trees that were accepted besides the chains of best candidates.",
    ),
    Metric("dflash:spec_trees", "counter", "drafts", "Verified blocks whose drafts branch."),
    Metric(
        "dflash:spec_tree_depth",
        "counter",
        "tokens",
        "Drafts on the longest path, over those blocks. Divided by dflash:spec_trees: the mean depth.",
    ),
    Metric(
        "dflash:spec_tree_width",
        "counter",
        "tokens",
        "Most drafts of one position, over those blocks. Divided by dflash:spec_trees: the mean width.",
    ),
    Metric(
        "dflash:spec_wasted_tokens",
        "counter",
        "tokens",
        "Rows of the target that verified rejected drafts.",
    ),
    Metric("dflash:target_rows", "counter", "rows", "Rows of the target's passes: prompts, anchors, drafts."),
    Metric(
        "dflash:spec_calibration_error",
        "gauge",
        "ratio",
        "Difference between predicted and observed acceptance, by position; no value without predictions.",
        (*SHARED_LABELS, "position"),
    ),
    Metric(
        "dflash:spec_num_speculative_tokens",
        "gauge",
        "tokens",
        "Drafts per block, as chosen last; no value without speculation.",
    ),
    Metric(
        "dflash:spec_disabled_seconds",
        "counter",
        "seconds",
        "Time in steps in which requests decode without drafts, by reason. plain_is_faster: as measured; "
        "measuring: plain steps; not_asked: disabled by requests; no_drafter: it is lost.",
        (*SHARED_LABELS, "reason"),
    ),
    # The benefit of speculation: docs/decisions/speed-up.md.
    Metric(
        "dflash:spec_speculating_seconds",
        "counter",
        "seconds",
        "Time in steps in which all requests decode and may draft, that are compared with plain ones: of "
        "short steps every other one; none before plain steps are measured.",
    ),
    Metric(
        "dflash:spec_plain_seconds",
        "counter",
        "seconds",
        "Time that plain decoding would have taken for the tokens of those steps, by measured plain steps.",
    ),
    Metric(
        "dflash:spec_speedup_ratio",
        "gauge",
        "ratio",
        "Speed-up over plain decoding, over about the last minute of decoding: the quotient of the growth "
        "of these two, so without steps that also compute prompts. No value before plain steps are "
        "measured.",
    ),
    # By tenant and category: at most max_metric_labels values each; all others count as "other".
    *(
        Metric(
            f"{what}_by_{label}",
            "counter",
            unit,
            f"{meaning}, for requests that have ended, by {label}; none: for requests that name none.",
            (*SHARED_LABELS, label),
        )
        for label in ("tenant", "category")
        for what, unit, meaning in ACCOUNT_METRICS
    ),
    # Experts.
    Metric(
        "manta:experts_read",
        "counter",
        "experts",
        "Experts whose weights were read, summed over routed layers, on the first rank. "
        "Divided by manta:routed_layers: distinct experts per layer and step.",
    ),
    Metric(
        "manta:routed_layers",
        "counter",
        "layers",
        "Passes through routed layers.",
    ),
    # Time by part.
    Metric("dflash:steps", "counter", "steps", "Steps that ended."),
    Metric(
        "dflash:step_seconds",
        "counter",
        "seconds",
        "Time of steps, by part: draft, verify, sample and inject as measured on the first rank; execute "
        "includes these and communication; schedule and commit are the host's.",
        (*SHARED_LABELS, "part"),
    ),
    # The drafter.
    Metric(
        "dflash:drafter_info",
        "gauge",
        "info",
        "Always 1; its labels name the drafter and say whether it is up or down. "
        "block_size: drafts of a block plus the anchor. No value without speculation.",
        (*SHARED_LABELS, "drafter", "revision", "method", "block_size", "target", "status"),
    ),
    Metric(
        "manta:drafter_up",
        "gauge",
        "drafters",
        "1 while drafts can be requested, else 0; no value without a drafter.",
    ),
    Metric(
        "manta:drafter_losses",
        "counter",
        "drafters",
        "Times that the drafter failed or was replaced; requests continued without drafts.",
    ),
    Metric(
        "manta:drafter_refilled_tokens",
        "counter",
        "tokens",
        "Tokens that were computed again to give a drafter its context.",
    ),
    Metric(
        "manta:drafter_rests",
        "counter",
        "rests",
        "Times that writing the drafter's context was stopped, because drafts had not paid off for long.",
    ),
    Metric(
        "manta:drafter_unwritten_tokens",
        "counter",
        "tokens",
        "Rows that were computed without writing the drafter's context.",
    ),
    Metric(
        "manta:drafter_served_steps",
        "counter",
        "steps",
        "Steps with drafts of a drafter in a process of its own, shared or not.",
    ),
    Metric(
        "manta:drafter_queue_seconds",
        "counter",
        "seconds",
        "Time in which that drafter could have worked for this engine, but worked for others that share "
        "it. Divided by dflash:steps: the cost of sharing per step.",
    ),
    Metric(
        "manta:drafter_served_seconds",
        "counter",
        "seconds",
        "Time of that drafter's work for this engine: drafts, context, admissions. Over all engines that "
        "share it, per second: its utilization.",
    ),
    # The audit in idle steps.
    Metric(
        "dflash:lossless_audit",
        "counter",
        "requests",
        "Answers chosen to be computed again without speculation, by result: match, mismatch; "
        "skipped if they could not be stored or computed.",
        (*SHARED_LABELS, "result"),
    ),
    # Captured traffic.
    Metric(
        "manta:captured_completions",
        "counter",
        "completions",
        "Completions chosen for --capture, by result: kept; redacted, if the hook dropped it; or lost: the "
        "hook failed (failed), it is larger than a segment (too_large), the folder is full or not "
        "writable (full), or the writing process is late or dead (behind).",
        (*SHARED_LABELS, "result"),
    ),
    # Batches of /v1/batches.
    Metric(
        "dflash:batch_rows_running",
        "gauge",
        "rows",
        "Lines of batches with a slot, included in vllm:num_requests_running; they may be paused.",
    ),
    Metric(
        "dflash:batch_rows_waiting",
        "gauge",
        "rows",
        "Lines of batches that wait for a slot or for pages, included in vllm:num_requests_waiting.",
    ),
    Metric(
        "dflash:batch_rows",
        "counter",
        "rows",
        "Lines of batches that this replica has finished, by result.",
        (*SHARED_LABELS, "status"),
    ),
    Metric(
        "dflash:batch_tokens",
        "counter",
        "tokens",
        "Tokens of the lines that were answered, by kind: prompt or generation.",
        (*SHARED_LABELS, "kind"),
    ),
    # HTTP.
    Metric(
        "http_requests",
        "counter",
        "requests",
        "HTTP requests, by route and status.",
        ("handler", "method", "status", "replica"),
    ),
    Metric(
        "http_request_duration_seconds",
        "histogram",
        "seconds",
        "Time from an HTTP request to the end of its response.",
        ("replica",),
        HTTP_S,
    ),
)
