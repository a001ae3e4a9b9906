"""Break the product in one place at a time and check that a test fails: `make mutations`.

Each `Mutation` replaces one piece of code in a copy of the repository and runs the test files that should
notice it, with `pytest -x`. A mutation is *found* when a test fails, and *missed* when all of them pass. The
unchanged copy is tested first, because a test that fails anyway finds nothing. The list covers the scheduler,
sampling and verification, draft trees, targets over several ranks, packed weights, the batch ledger, and the
HTTP and worker protocols; docs/testing.md has the last result. It is not a part of `make test`: a run takes
about fifteen minutes.

    python tests/trials mutations                         every mutation
    python tests/trials mutations -k ledger -k writer     those whose name or file contains one of the words
    python tests/trials mutations --changed main          those whose tests differ from a git revision
    python tests/trials mutations --check                 only whether each old text is there exactly once
    python tests/trials mutations -o table.md             also write the result as a Markdown table

Exits with 1 when a mutation is missed, when an old text is not in its file exactly once, or when a test fails
without a mutation.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.paths import ROOT

TIMEOUT_S = 600.0
TESTS_FAILED = 1  # pytest's exit status; others mean that it could not run the tests


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of the product's code.

    Attributes:
        name: what the product does wrong with this change.
        file: path below the repository's root.
        old, new: the text that is replaced, which the file contains exactly once, and its replacement.
        tests: test files that should notice, without `test_` and `.py`, the quickest first.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


_SCHEDULER = ("cluster_scheduler", "cluster_engine", "cluster_properties")
_PAGES = ("cluster_pages", "cluster_page_groups")
_LEDGER = ("batch_ledger", "batch_exactly_once")

MUTATIONS = (
    # The scheduler.
    Mutation(
        "drafts one token beyond the greatest length",
        "cluster/scheduler/scheduler.py",
        "remaining_R = table.max_length_S[slots_R] - num_tokens_R - 1",
        "remaining_R = table.max_length_S[slots_R] - num_tokens_R",
        _SCHEDULER,
    ),
    Mutation(
        "applies results of a step to a request that has left",
        "cluster/scheduler/scheduler.py",
        "step.remaining_R[step.plan.slots == slot] = False",
        "step.remaining_R[step.plan.slots == slot] = True",
        _SCHEDULER,
    ),
    Mutation(
        "preempts the first request of a step instead of the last",
        "cluster/scheduler/scheduler.py",
        "last = self.table.sequences[int(slots_R[num_left - 1])]",
        "last = self.table.sequences[int(slots_R[0])]",
        _SCHEDULER,
    ),
    Mutation(
        "splits a prompt although chunked prefill is off",
        "cluster/scheduler/scheduler.py",
        "if not self.config.enable_chunked_prefill and budget < left <= self.config.max_rows:",
        "if not self.config.enable_chunked_prefill and budget < left < self.config.max_rows:",
        _SCHEDULER,
    ),
    Mutation(
        "keeps pages that a failed request computed in the prefix cache",
        "cluster/scheduler/scheduler.py",
        "if outcome.failed.any():",
        "if outcome.failed.all() and not len(outcome.failed):",
        ("cluster_scheduler",),
    ),
    Mutation(
        "gives drafts to the first request before every request has a row",
        "cluster/scheduler/scheduler.py",
        "np.maximum(budget - len(wanted_R) - used_R, 0)",
        "np.maximum(budget - 1 - used_R, 0)",
        _SCHEDULER,
    ),
    Mutation(
        "counts the newest token as computed",
        "cluster/step/step_outcome.py",
        "known_R + np.maximum(num_out_R - 1, 0),",
        "known_R + num_out_R,",
        _SCHEDULER,
    ),
    Mutation(
        "ignores a stop token at the minimum length",
        "cluster/step/step_outcome.py",
        "may_stop = begin + column >= sampling.min_length",
        "may_stop = begin + column > sampling.min_length",
        ("cluster_engine", "cluster_properties"),
    ),
    Mutation(
        "leaves out the stop token",
        "cluster/step/step_outcome.py",
        "return column + 1",
        "return column",
        ("cluster_engine", "cluster_properties"),
    ),
    Mutation(
        "admits a request without spare pages for running requests",
        "cluster/scheduler/request_queues.py",
        "return len(self.running) if sequence.request.background else self.num_online_running",
        "return 0",
        _SCHEDULER,
    ),
    Mutation(
        "ignores priorities",
        "cluster/scheduler/request_queues.py",
        "priority = request.priority if self._config.by_priority else 0",
        "priority = 0",
        _SCHEDULER,
    ),
    Mutation(
        "refuses a request although the queue has room for it",
        "cluster/engine/engine_core.py",
        "self._queues.num_online_waiting + count > maximum + free_slots:",
        "self._queues.num_online_waiting + count >= maximum + free_slots:",
        ("cluster_engine",),
    ),
    Mutation(
        "evicts the page that was used last",
        "cluster/kv_cache/prefix_cache.py",
        "self._evictable.popitem(last=False)",
        "self._evictable.popitem(last=True)",
        _PAGES,
    ),
    Mutation(
        "frees a page that another request still uses",
        "cluster/kv_cache/prefix_cache.py",
        "if self.ref_counts[page] > 0:\n                continue",
        "if self.ref_counts[page] > 1:\n                continue",
        _PAGES,
    ),
    Mutation(
        "shares cached prefixes between salts",
        "cluster/kv_cache/prefix_cache.py",
        "parent = digests[-1] if digests else _root(salt)",
        "parent = digests[-1] if digests else _root(None)",
        ("cluster_pages", "cluster_scheduler"),
    ),
    Mutation(
        "finds an evicted page in the prefix cache",
        "cluster/kv_cache/prefix_cache.py",
        "self.on_evict(page)",
        "page = page",
        _PAGES,
    ),
    # Sampling and verification.
    Mutation(
        "accepts drafts after a rejected one",
        "drafter/step/sampling/verification.py",
        "(chosen_RW[:, :-1] == drafts_RK).cumprod(dim=1)",
        "(chosen_RW[:, :-1] == drafts_RK)",
        ("verification",),
    ),
    Mutation(
        "emits a token of a request that samples nothing",
        "drafter/step/sampling/verification.py",
        "(accepted_RK.sum(dim=1) + 1) * (counts_R > 0)",
        "(accepted_RK.sum(dim=1) + 1) * (counts_R >= 0)",
        ("verification",),
    ),
    Mutation(
        "uses the same noise at every position",
        "drafter/step/inputs/gumbel_noise.py",
        "_mix(_mix(_mix(low ^ _CHAINS_21) ^ high) ^ position)",
        "_mix(_mix(_mix(low ^ _CHAINS_21) ^ high))",
        ("sampling",),
    ),
    Mutation(
        "returns infinite noise where u rounds to 1",
        "drafter/step/inputs/gumbel_noise.py",
        "minus_u_MV.clamp_(min=-1.0 + 2.0**-24)",
        "minus_u_MV.clamp_(min=-1.0)",
        ("sampling",),
    ),
    Mutation(
        "keeps one token more than top-k",
        "drafter/step/sampling/top_k_top_p.py",
        "(top_k_M - 1).clamp_(",
        "top_k_M.clone().clamp_(",
        ("sampling",),
    ),
    Mutation(
        "cuts the token that reaches top-p",
        "drafter/step/sampling/top_k_top_p.py",
        "before_Mk = sorted_Mk.double().cumsum(dim=-1) - sorted_Mk",
        "before_Mk = sorted_Mk.double().cumsum(dim=-1)",
        ("sampling",),
    ),
    Mutation(
        "leaves the margin of a single kept token infinite",
        "drafter/step/sampling/sampler.py",
        "if batch.narrows:\n        margins_M",
        "if batch.narrows and False:\n        margins_M",
        ("sampling",),
    ),
    Mutation(
        "applies the presence penalty to tokens of the prompt",
        "drafter/step/inputs/logits_processors.py",
        "rules.presence * (seen.counts_WU > 0)",
        "rules.presence * seen.seen_WU",
        ("token_rules",),
    ),
    Mutation(
        "rewards repetition of tokens with negative logits",
        "drafter/step/inputs/logits_processors.py",
        "logits_WU * rules.repetition)",
        "logits_WU / rules.repetition)",
        ("token_rules",),
    ),
    Mutation(
        "lets reasoning run one token over its budget",
        "drafter/step/sampling/logits_processor_states.py",
        "(count := self.num_read - self.begin) < self.rule.budget",
        "(count := self.num_read - self.begin) <= self.rule.budget",
        ("token_rules",),
    ),
    Mutation(
        "shows a draft of a tree the tokens of the row before instead of its own path's",
        "drafter/step/sampling/logits_processor_states.py",
        "after(states[parent], draft)",
        "after(states[-1], draft)",
        ("token_rules",),
    ),
    Mutation(
        "follows a grammar from the row before in a tree instead of the parent",
        "drafter/grammars/tree_walks.py",
        "before = self._places[parents[row - 1]]",
        "before = self._places[row - 1]",
        ("grammars",),
    ),
    Mutation(
        "looks up the first occurrence of a run instead of the last",
        "drafter/step/sampling/ngram_lookup.py",
        "begin = int(ends[-1]) + 1",
        "begin = int(ends[0]) + 1",
        ("suffix", "kernels_steps"),
    ),
    Mutation(
        "verifies one draft more than the trimmed number",
        "drafter/step/sampling/verification.py",
        "columns_K >= num_drafts_R.unsqueeze(1)",
        "columns_K > num_drafts_R.unsqueeze(1)",
        ("trimming", "kernels_trimming"),
    ),
    # Targets that are split over ranks, and a kernel.
    Mutation(
        "norms a row by its padded width",
        "drafter/compute/gpu_triton/common/element_ops.py",
        "tl.rsqrt(tl.sum(x_H * x_H, axis=0) / WIDTH + eps)",
        "tl.rsqrt(tl.sum(x_H * x_H, axis=0) / BLOCK + eps)",
        ("kernels_layers",),
    ),
    Mutation(
        "does not add up the products of ranks",
        "drafter/compute/block_weights.py",
        "y_NO = self.all_reduce(self.part(x_NK))",
        "y_NO = self.part(x_NK)",
        ("target_parallel",),
    ),
    Mutation(
        "gives ranks that share KV heads the heads of other queries",
        "actors/targets/model/tensor_parallel.py",
        "head = self.rank * count // self.world_size",
        "head = self.rank % count",
        ("target_parallel",),
    ),
    # The batch ledger and its writers.
    Mutation(
        "answers failed rows again in every run",
        "actors/batch/ledger/ledger.py",
        "difference(self._spec.rows, union(self.answered, self.failed))",
        "difference(self._spec.rows, self.answered)",
        _LEDGER,
    ),
    Mutation(
        "drops segments of rows that failed in an earlier run",
        "actors/batch/ledger/ledger.py",
        "self._index.failed_since(self._index.run_of(writer))",
        "self._index.failed",
        _LEDGER,
    ),
    Mutation(
        "lets an engine write after the job has finished",
        "actors/batch/ledger/ledger.py",
        "allow_writes(self._output, None)",
        "self._index.refresh()",
        _LEDGER,
    ),
    Mutation(
        "reports success although rows are missing",
        "actors/batch/ledger/ledger.py",
        "if unanswered := self.unanswered:",
        "if (unanswered := self.unanswered) and not self.answered:",
        _LEDGER,
    ),
    Mutation(
        "writes a part for a job that continued without this engine",
        "actors/batch/ledger/row_writer.py",
        "check_run(self._output, self._run)",
        "pass",
        (*_LEDGER, "batch_writer"),
    ),
    Mutation(
        "removes segments before the part that replaces them is written",
        "actors/batch/ledger/row_writer.py",
        "while batch.parts:\n            check_run",
        "self._output.remove(*batch.segments)\n        while batch.parts:\n            check_run",
        ("batch_writer",),
    ),
    Mutation(
        "writes adopted rows that are in a part already",
        "actors/batch/ledger/row_writer.py",
        "mask = [not contains(known, row) for row in row_numbers(segment.table)]",
        "mask = [True for row in row_numbers(segment.table)]",
        ("batch_writer",),
    ),
    Mutation(
        "keeps a row's failure instead of its answer",
        "actors/batch/ledger/row_writer.py",
        "np.lexsort((failed, rows))",
        "np.lexsort((~failed, rows))",
        ("batch_writer",),
    ),
    Mutation(
        "loses rows whose segment could not be written at first",
        "actors/batch/ledger/row_writer.py",
        "self._save(*self._unsaved[0])\n"
        "            durable.append(from_rows(row_numbers(self._unsaved.popleft()[1])))",
        "self._save(*(row := self._unsaved.popleft()))\n"
        "            durable.append(from_rows(row_numbers(row[1])))",
        ("batch_writer",),
    ),
    Mutation(
        "counts a part in addition to the one that replaces it",
        "actors/batch/ledger/output_index.py",
        "if part not in replaced}",
        "if part not in replaced or True}",
        _LEDGER,
    ),
    # The HTTP protocol.
    Mutation(
        "ends a stream without its last event",
        "actors/http/wire/sse.py",
        "await send(_body(self._ending(failure)))",
        "await asyncio.sleep(0)",
        ("http_server",),
    ),
    Mutation(
        "continues to generate for a disconnected client",
        "actors/http/wire/sse.py",
        "await cancel(working, gone)",
        "await cancel(gone)",
        ("http_requests", "http_server"),
    ),
    Mutation(
        "shows a client's timelines without the admin key",
        "actors/http/middleware/api_keys.py",
        "known = self._any or (self._admin if path in OWN_PATHS else [])",
        "known = self._any",
        ("http_keys",),
    ),
    Mutation(
        "shows internal errors to clients",
        "actors/http/wire/errors.py",
        "(isinstance(error, MantaError) and error.status != 500):",
        "isinstance(error, MantaError):",
        ("http_requests",),
    ),
    Mutation(
        "omits when to retry an overloaded server",
        "actors/http/wire/errors.py",
        "if retryable or status in (429, 503):",
        "if retryable:",
        ("http_requests", "http_request_gate"),
    ),
    Mutation(
        "never frees the slot of a request that has ended",
        "actors/http/middleware/request_gate.py",
        "self._num_received -= 1",
        "self._num_received -= 0",
        ("http_request_gate",),
    ),
    Mutation(
        "reports a tool call for a truncated answer",
        "actors/http/generation/generation.py",
        'return "tool_calls" if called and finish_reason == "stop" else finish_reason',
        'return "tool_calls" if called else finish_reason',
        ("http_chat",),
    ),
    Mutation(
        "sends usage to clients that did not ask for it",
        "actors/http/generation/generation.py",
        "if single and output.finished and with_usage:",
        "if single and output.finished:",
        ("http_server",),
    ),
    # The worker protocol.
    Mutation(
        "overwrites a fragment that a worker has not read",
        "actors/workers/shm/ring_buffer.py",
        "self._memory.read(self._head) - slowest < self._num_slots",
        "self._memory.read(self._head) - slowest <= self._num_slots",
        ("channel",),
    ),
    Mutation(
        "reads messages of a peer with a wrong proof",
        "actors/workers/shm/endpoint.py",
        "if hmac.compare_digest(begin, proof):",
        "if begin:",
        ("channel", "drafter_link"),
    ),
    Mutation(
        "lets a worker trust an engine with a wrong proof",
        "actors/workers/shm/step_channel.py",
        "is_proven = hmac.compare_digest(sock.recv(len(proof), socket.MSG_WAITALL), proof)",
        "is_proven = len(sock.recv(len(proof), socket.MSG_WAITALL)) == len(proof)",
        ("channel",),
    ),
    Mutation(
        "gives out bytes of the mailbox that are still in use",
        "actors/workers/shm/tensor_mailbox.py",
        "        else:\n            fits = begin + size_bytes < oldest",
        "        else:\n            fits = begin + size_bytes <= oldest + size_bytes",
        ("drafter_link",),
    ),
    Mutation(
        "forgets a step of which the drafter has not read all parts",
        "actors/workers/drafter/drafter_client.py",
        "if open_step.is_over and not open_step.num_reported:",
        "if open_step.is_over:",
        ("drafter_link",),
    ),
    # Draft trees, packed weights, and what agents are answered.
    Mutation(
        "accepts a node of a tree whose parent was rejected",
        "drafter/step/inputs/draft_trees.py",
        "if parents[node] == path[-1] and tokens[node] == chosen[path[-1]]:",
        "if tokens[node] == chosen[path[-1]]:",
        ("draft_trees", "accepted_paths"),
    ),
    Mutation(
        "counts a tree's positions by row instead of by depth",
        "drafter/step/inputs/draft_trees.py",
        "positions_N[first : first + count] = positions_N[first] + depths_RW[r, :count]",
        "positions_N[first : first + count] = positions_N[first] + np.arange(count)",
        ("draft_trees", "lossless"),
    ),
    Mutation(
        "adds the zeros of packed codes instead of subtracting them",
        "drafter/compute/cpu_fused/packed_weight.py",
        "shifts_1[i] *= -scales_1[i]",
        "shifts_1[i] *= scales_1[i]",
        ("cpu_codes",),
    ),
    Mutation(
        "exchanges the two codes of a byte",
        "drafter/compute/cpu_fused/tiles/code_tiles.py",
        "return builder.lshr(both, lanes(4, element)) if half else both",
        "return both if half else builder.lshr(both, lanes(4, element))",
        ("cpu_codes",),
    ),
    Mutation(
        "announces a custom tool's call twice in a stream of responses",
        "actors/http/responses/event_writer.py",
        "return [] if self._is_sent_complete(section) else [self._added(section)]",
        "return [self._added(section)]",
        ("http_agents", "http_translation"),
    ),
    Mutation(
        "ends a message with a call as if it had none",
        "actors/http/anthropic/event_writer.py",
        'stop = "tool_use" if self.has_calls else "end_turn"',
        'stop = "end_turn"',
        ("http_agents", "http_translation"),
    ),
)


def misplaced(root: Path, mutations: Sequence[Mutation]) -> list[str]:
    """Return a message for each mutation whose old text is not in its file exactly once."""
    found: list[str] = []
    for mutation in mutations:
        path = root / mutation.file
        count = path.read_text().count(mutation.old) if path.exists() else 0
        if count != 1:
            found.append(f"{mutation.file} contains {count} times, not once: {mutation.old!r}")
        found += [f"there is no test_{name}.py" for name in mutation.tests if not paths_of(name)]
    return found


def files_of(mutations: Sequence[Mutation]) -> list[str]:
    """Return the paths of the mutations' test files, each once."""
    names = dict.fromkeys(name for each in mutations for name in each.tests)
    return [path.relative_to(ROOT).as_posix() for name in names for path in paths_of(name)]


def paths_of(name: str) -> list[Path]:
    """Return the path of a test file below `tests/` by its name, in a list: empty if there is none."""
    return list((ROOT / "tests").rglob(f"test_{name}.py"))


@contextmanager
def copied_repository() -> Iterator[Path]:
    """Yield a copy of the files that git tracks or would track. Its folder is named as the package is."""
    with tempfile.TemporaryDirectory(prefix="manta-mutations-") as folder:
        root = Path(folder) / "manta"
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            if (source := ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, root / name)
        yield root


def run_tests(root: Path, files: Sequence[str]) -> tuple[int, str]:
    """Run test files of a copy until one test fails; return pytest's exit status and the failed test."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *files]
    environment = {**os.environ, "PYTHONPATH": str(root.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.setdefault("OMP_NUM_THREADS", "1")
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return TESTS_FAILED, f"no end within {TIMEOUT_S:g} s"
    lines = done.stdout.splitlines()
    failed = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    said = failed or lines[-1:] or [done.stderr[-500:]]
    return done.returncode, said[0].removeprefix("FAILED ").removeprefix("ERROR ")


def finder(root: Path, mutation: Mutation) -> str | None:
    """Return the test that finds a mutation, or None. Raises RuntimeError if pytest could not run."""
    path = root / mutation.file
    before = path.read_text()
    path.write_text(before.replace(mutation.old, mutation.new))
    try:
        for file in files_of([mutation]):
            status, said = run_tests(root, [file])
            if status == TESTS_FAILED:
                return said
            if status:
                raise RuntimeError(f"{mutation.name}: pytest could not run {file}: {said}")
    finally:
        path.write_text(before)
    return None


def table_of(found: Sequence[tuple[Mutation, str | None]]) -> str:
    """Return the result as a Markdown table."""
    lines = ["| the product ... | file | found by |", "|---|---|---|"]
    for mutation, test in found:
        shown = "**nothing**" if test is None else f"`{re.sub(r'^[^:]*/', '', test)}`"
        lines.append(f"| {mutation.name} | `{mutation.file}` | {shown} |")
    return "\n".join(lines) + "\n"


def chosen(words: Sequence[str], revision: str | None) -> list[Mutation]:
    """Return the mutations that have one of the words, or all; of these, those whose tests have changed."""
    mutations = [
        each for each in MUTATIONS if not words or any(word in f"{each.name} {each.file}" for word in words)
    ]
    if revision is not None:
        command = ["git", "diff", "--name-only", revision, "--", "tests"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
        changed = set(listed.split())
        mutations = [each for each in mutations if changed.intersection(files_of([each]))]
    return mutations


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Break the product in one place at a time and run its tests."
    )
    parser.add_argument(
        "-k", action="append", default=[], metavar="WORD", help="only with WORD in name or file"
    )
    parser.add_argument("--changed", metavar="REVISION", help="only those whose test files differ from it")
    parser.add_argument("--check", action="store_true", help="only check that each old text is there once")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write a Markdown table")
    options = parser.parse_args()
    mutations = chosen(options.k, options.changed)
    if wrong := misplaced(ROOT, mutations):
        print(*wrong, sep="\n")
        return 1
    if options.check or not mutations:
        return 0
    found: list[tuple[Mutation, str | None]] = []
    with copied_repository() as root:
        status, said = run_tests(root, files_of(mutations))
        if status:
            print(f"without a mutation: {said}")
            return 1
        for mutation in mutations:
            test = finder(root, mutation)
            found.append((mutation, test))
            print(
                f"{'missed' if test is None else 'found '}  {mutation.name}: {test or mutation.file}",
                flush=True,
            )
    if options.output is not None:
        options.output.write_text(table_of(found))
    missed = sum(test is None for _, test in found)
    print(f"{len(found) - missed} found, {missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
