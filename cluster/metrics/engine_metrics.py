"""The catalogue of metrics that an engine exports, with their meanings.

Names are vLLM's (`vllm:...`), so that dashboards and routers made for vLLM work. Exported by
`actors/observability/telemetry.py`, where counters get `_total`, and all of them also by
`actors/observability/ray_metrics.py`. A test serves requests and finds a sample of every one.
`fleet_metrics.py` has those of gateways, batch jobs and the autoscaler.
"""

from __future__ import annotations

from .metric import HTTP_S, Metric, Unit, counter, gauge, histogram
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
    counter(
        "vllm:spec_decode_num_drafts", "drafts", "Verified blocks (requests x steps).", stat="num_drafts"
    ),
    counter(
        "vllm:spec_decode_num_draft_tokens", "tokens", "Drafts that were verified.", stat="num_draft_tokens"
    ),
    counter(
        "vllm:spec_decode_num_accepted_tokens",
        "tokens",
        "Drafts that were accepted.",
        stat="num_accepted_tokens",
    ),
    counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "tokens",
        "Drafts that were accepted, by position in the block.",
        "position",
        stat="accepted_per_pos",
    ),
    gauge(
        "vllm:spec_decode_mean_accepted_length",
        "tokens",
        "Mean acceptance length since the start, including the bonus token; no value before the first draft.",
    ),
    counter(
        "manta:spec_draft_tokens",
        "tokens",
        "Drafts that were verified, by the method that made them: the engine's, or suffix beside a drafter.",
        "method",
    ),
    counter(
        "manta:spec_accepted_tokens",
        "tokens",
        "Drafts that were accepted, by the method that made them.",
        "method",
    ),
    counter(
        "manta:drafter_skipped_passes",
        "steps",
        "Steps without the drafter's pass, because copies were expected to win for all requests.",
        stat="skipped_passes",
    ),
    counter(
        "dflash:spec_proposed_tokens",
        "tokens",
        "Drafts that were made, verified or not.",
        stat="num_proposed_tokens",
    ),
    counter(
        "dflash:spec_trimmed_tokens",
        "tokens",
        "Drafts that were not verified, because their margins were too small to pay off.",
        stat="num_trimmed_tokens",
    ),
    counter(
        "dflash:spec_branch_tokens",
        "tokens",
        "Drafts of trees that were verified besides the chains of best candidates.",
        stat="num_branch_tokens",
    ),
    counter(
        "dflash:spec_accepted_branch_tokens",
        "tokens",
        "Drafts of trees that were accepted besides the chains of best candidates.",
        stat="num_accepted_branch_tokens",
    ),
    counter("dflash:spec_trees", "drafts", "Verified blocks whose drafts branch.", stat="num_trees"),
    counter(
        "dflash:spec_tree_depth",
        "tokens",
        "Drafts on the longest path, over those blocks. Divided by dflash:spec_trees: the mean depth.",
        stat="tree_depths",
    ),
    counter(
        "dflash:spec_tree_width",
        "tokens",
        "Most drafts of one position, over those blocks. Divided by dflash:spec_trees: the mean width.",
        stat="tree_widths",
    ),
    counter("dflash:spec_wasted_tokens", "tokens", "Rows of the target that verified rejected drafts."),
    counter(
        "dflash:target_rows",
        "rows",
        "Rows of the target's passes: prompts, anchors, drafts.",
        stat="target_rows",
    ),
    gauge(
        "dflash:spec_calibration_error",
        "ratio",
        "Difference between predicted and observed acceptance, by position; no value without predictions.",
        "position",
        stat="calibration_error",
    ),
    gauge(
        "dflash:spec_num_speculative_tokens",
        "tokens",
        "Drafts per block, as chosen last; no value without speculation.",
    ),
    counter(
        "dflash:spec_disabled_seconds",
        "seconds",
        "Time in steps in which requests decode without drafts, by reason. plain_is_faster: as measured; "
        "measuring: plain steps; not_asked: disabled by requests; no_drafter: it is lost.",
        "reason",
        stat="undrafted_s",
    ),
    # The benefit of speculation: docs/decisions/speed-up.md.
    counter(
        "dflash:spec_speculating_seconds",
        "seconds",
        "Time in steps in which all requests decode and may draft, that are compared with plain ones: of "
        "short steps every other one; none before plain steps are measured.",
        stat="speculating_s",
    ),
    counter(
        "dflash:spec_plain_seconds",
        "seconds",
        "Time that plain decoding would have taken for the tokens of those steps, by measured plain steps.",
        stat="plain_s",
    ),
    gauge(
        "dflash:spec_speedup_ratio",
        "ratio",
        "Speed-up over plain decoding, over about the last minute of decoding: the quotient of the growth"
        " of these two, so without steps that also compute prompts. No value before plain steps are "
        "measured.",
    ),
    # By tenant and category: at most max_metric_labels values each; all others count as "other".
    *(
        counter(
            f"{what}_by_{label}",
            unit,
            f"{meaning}, for requests that have ended, by {label}; none: for requests that name none.",
            label,
        )
        for label in ("tenant", "category")
        for what, unit, meaning in ACCOUNT_METRICS
    ),
    # Experts.
    counter(
        "manta:experts_read",
        "experts",
        "Experts whose weights were read, summed over routed layers, on the first rank. Divided by "
        "manta:routed_layers: distinct experts per layer and step.",
        stat="experts_read",
    ),
    counter("manta:routed_layers", "layers", "Passes through routed layers.", stat="routed_layers"),
    # Time by part.
    counter("dflash:steps", "steps", "Steps that ended.", stat="steps"),
    counter(
        "dflash:step_seconds",
        "seconds",
        "Time of steps, by part: draft, verify, sample and inject as measured on the first rank; execute "
        "includes these and communication; schedule and commit are the host's.",
        "part",
        stat="step_seconds",
    ),
    # The drafter.
    gauge(
        "dflash:drafter_info",
        "info",
        "Always 1; its labels name the drafter and say whether it is up or down. block_size: drafts of a "
        "block plus the anchor. No value without speculation.",
        *("drafter", "revision", "method", "block_size", "target", "status"),
    ),
    gauge(
        "manta:drafter_up", "drafters", "1 while drafts can be requested, else 0; no value without a drafter."
    ),
    counter(
        "manta:drafter_losses",
        "drafters",
        "Times that the drafter failed or was replaced; requests continued without drafts.",
        stat="drafter_losses",
    ),
    counter(
        "manta:drafter_refilled_tokens",
        "tokens",
        "Tokens that were computed again to give a drafter its context.",
        stat="drafter_refilled_tokens",
    ),
    counter(
        "manta:drafter_rests",
        "rests",
        "Times that writing the drafter's context was stopped, because drafts had not paid off for long.",
        stat="drafter_rests",
    ),
    counter(
        "manta:drafter_unwritten_tokens",
        "tokens",
        "Rows that were computed without writing the drafter's context.",
        stat="drafter_unwritten_tokens",
    ),
    counter(
        "manta:drafter_served_steps",
        "steps",
        "Steps with drafts of a drafter in a process of its own, shared or not.",
        stat="drafter_use.steps",
    ),
    counter(
        "manta:drafter_queue_seconds",
        "seconds",
        "Time in which that drafter could have worked for this engine, but worked for others that share "
        "it. Divided by dflash:steps: the cost of sharing per step.",
        stat="drafter_use.queue_s",
    ),
    counter(
        "manta:drafter_served_seconds",
        "seconds",
        "Time of that drafter's work for this engine: drafts, context, admissions. Over all engines that "
        "share it, per second: its utilization.",
        stat="drafter_use.served_s",
    ),
    # The audit in idle steps.
    counter(
        "dflash:lossless_audit",
        "requests",
        "Answers chosen to be computed again without speculation, by result: match, mismatch; skipped if "
        "they could not be stored or computed.",
        "result",
    ),
    # Captured traffic.
    counter(
        "manta:captured_completions",
        "completions",
        "Completions chosen for --capture, by result: kept; redacted, if the hook dropped it; or lost: "
        "the hook failed (failed), it is larger than a segment (too_large), the folder is full or not "
        "writable (full), or the writing process is late or dead (behind).",
        "result",
    ),
    # Batches of /v1/batches.
    gauge(
        "dflash:batch_rows_running",
        "rows",
        "Lines of batches with a slot, included in vllm:num_requests_running; they may be paused.",
        stat="background_running",
    ),
    gauge(
        "dflash:batch_rows_waiting",
        "rows",
        "Lines of batches that wait for a slot or for pages, included in vllm:num_requests_waiting.",
        stat="background_waiting",
    ),
    counter(
        "dflash:batch_rows", "rows", "Lines of batches that this replica has finished, by result.", "status"
    ),
    counter(
        "dflash:batch_tokens",
        "tokens",
        "Tokens of the lines that were answered, by kind: prompt or generation.",
        "kind",
    ),
    # HTTP.
    counter(
        "http_requests",
        "requests",
        "HTTP requests, by route and status.",
        shared=("handler", "method", "status", "replica"),
    ),
    histogram(
        "http_request_duration_seconds",
        "seconds",
        "Time from an HTTP request to the end of its response.",
        HTTP_S,
        shared=("replica",),
    ),
)
