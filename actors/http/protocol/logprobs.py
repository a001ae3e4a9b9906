"""Log probabilities in OpenAI's two formats: chat's list of tokens, completions' parallel lists.

A token's text is decoded on its own, so a token that is part of a character is shown as U+FFFD, as in vLLM.
Its `bytes` are its actual ones, which add up to the answer's text. In completions' lists, where texts are
keys, it is shown by its bytes, as by OpenAI; offsets count the characters of its text. Without a tokenizer,
tokens are called `token_id:7`.
"""

from __future__ import annotations

from ...engine.outputs import CompletionOutput, OutputLogprobs, PromptLogprobs
from ..wire.json_io import JsonObject


def chat_logprobs(completion: CompletionOutput, num_top: int) -> JsonObject:
    logprobs = _logprobs_of(completion)
    seen: dict[int, JsonObject] = {}  # cache: the same few tokens are often likely

    def token(token_id: int, logprob: float) -> JsonObject:
        if (entry := seen.get(token_id)) is None:
            text, data = logprobs.text_of(token_id), logprobs.bytes_of(token_id)
            entry = seen[token_id] = {"token": text, "bytes": list(data)}
        return {**entry, "logprob": logprob}

    return {
        "content": [
            {
                **token(token_id, logprob),
                "top_logprobs": list(map(token, top_ids[:num_top], top_logprobs[:num_top])),
            }
            for token_id, logprob, _, top_ids, top_logprobs in logprobs.numbers
        ],
        "refusal": None,
    }


def completion_logprobs(completion: CompletionOutput, num_top: int, offset: int) -> JsonObject:
    """`offset`: number of characters of the preceding tokens."""
    return _lists(_logprobs_of(completion), num_top, offset)


def echo_logprobs(prompt: PromptLogprobs, num_top: int, num_chars: int) -> JsonObject:
    """Return the lists of a prompt; the first token has only its text. Tokens added before it: offset 0."""
    first = prompt.first_text
    length = len(first) + _length(prompt.scored)
    lists = _lists(prompt.scored, num_top, num_chars - length + len(first))
    begin = {"text_offset": num_chars - length, "token_logprobs": None, "tokens": first, "top_logprobs": None}
    found = {name: [begin[name], *values] for name, values in lists.items()}
    return found | {"text_offset": [max(offset, 0) for offset in found["text_offset"]]}


def _lists(logprobs: OutputLogprobs, num_top: int, offset: int) -> JsonObject:
    tokens: list[str] = []
    offsets: list[int] = []
    values: list[float] = []
    tops: list[dict[str, float]] = []
    for own_id, own, _, top_ids, top_logprobs in logprobs.numbers:
        tokens.append(_name(logprobs, own_id))
        offsets.append(offset)
        values.append(own)
        # The token itself is always included. Of tokens with the same text the likeliest is kept.
        top = zip((own_id, *top_ids[:num_top][::-1]), (own, *top_logprobs[:num_top][::-1]), strict=True)
        tops.append({_name(logprobs, token_id): value for token_id, value in top})
        offset += len(logprobs.text_of(own_id))
    return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}


def _name(logprobs: OutputLogprobs, token_id: int) -> str:
    """Return a token's text, or `bytes:\\xe2\\x80` as OpenAI for a part of a character, which has none."""
    text, data = logprobs.text_of(token_id), logprobs.bytes_of(token_id)
    if "\ufffd" not in text or "\ufffd" in data.decode(errors="ignore"):
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def token_lengths(completion: CompletionOutput) -> int:
    """Return the total length of all tokens' texts, each decoded on its own."""
    return _length(_logprobs_of(completion))


def _length(logprobs: OutputLogprobs) -> int:
    return sum(len(logprobs.text_of(token_id)) for token_id, *_ in logprobs.numbers)


def _logprobs_of(completion: CompletionOutput) -> OutputLogprobs:
    return OutputLogprobs(None) if completion.logprobs is None else completion.logprobs
