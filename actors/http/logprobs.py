"""Log probabilities in OpenAI's two shapes: chat's list of tokens, completions' parallel lists.

A token's text is its own decoding, so a token that is part of a character is shown as U+FFFD, as vLLM does.
Without a tokenizer tokens are called `token_id:7`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..logprobs import Logprob, PlaceLogprobs, PromptLogprobs, shown_token
from ..outputs import CompletionOutput
from .wire import JsonObject


def chat_logprobs(completion: CompletionOutput, num_top: int) -> JsonObject:
    """Of the tokens in `completion`, each with its `num_top` likeliest alternatives."""

    def token(token_id: int, found: Logprob) -> JsonObject:
        text = _text(token_id, found)
        return {"token": text, "logprob": found.logprob, "bytes": list(text.encode())}

    return {
        "content": [
            {
                **token(*next(iter(place.items()))),
                "top_logprobs": [token(*entry) for entry in _likeliest(place, num_top)],
            }
            for place in completion.logprobs or ()
        ],
        "refusal": None,
    }


def completion_logprobs(completion: CompletionOutput, num_top: int, offset: int) -> JsonObject:
    """The same in lists; `offset` is the length of the text of the tokens before."""
    return _lists(completion.logprobs or (), num_top, offset)


def echo_logprobs(prompt: PromptLogprobs, num_top: int, num_chars: int) -> JsonObject:
    """Of a prompt whose text has so many characters. Of its first token there is the text alone; tokens that
    the tokenizer has put before the text begin where it does."""
    first = prompt.first_text
    length = len(first) + _length(prompt.told)
    lists = _lists(prompt.told, num_top, num_chars - length + len(first))
    begin = {"text_offset": num_chars - length, "token_logprobs": None, "tokens": first, "top_logprobs": None}
    found = {name: [begin[name], *values] for name, values in lists.items()}
    return found | {"text_offset": [max(offset, 0) for offset in found["text_offset"]]}


def _lists(places: Sequence[PlaceLogprobs], num_top: int, offset: int) -> JsonObject:
    tokens: list[str] = []
    offsets: list[int] = []
    values: list[float] = []
    tops: list[dict[str, float]] = []
    for place in places:
        own_id, own = next(iter(place.items()))
        tokens.append(_text(own_id, own))
        offsets.append(offset)
        values.append(own.logprob)
        shown = [*_likeliest(place, num_top), (own_id, own)]  # the token's own stands there always
        tops.append({_text(token_id, found): found.logprob for token_id, found in reversed(shown)})
        offset += len(tokens[-1])
    return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}


def token_lengths(completion: CompletionOutput) -> int:
    """The length of the text of all tokens in `completion`, each by itself."""
    return _length(completion.logprobs or ())


def _length(places: Sequence[PlaceLogprobs]) -> int:
    return sum(len(_text(*next(iter(place.items())))) for place in places)


def _likeliest(place: PlaceLogprobs, count: int) -> list[tuple[int, Logprob]]:
    return sorted(place.items(), key=lambda entry: entry[1].rank)[:count]


def _text(token_id: int, found: Logprob) -> str:
    return shown_token(token_id, found.decoded_token)
