"""Check that an engine tells the truth about the tokens that it samples: their ids, their text, their probabilities.

A trainer trains on the ids and the log-probabilities that the engine returns, so wrong ones train another policy
without an error. Each check compares two things that only a truthful engine makes agree: the text with the ids, the
reported log-probabilities with those that the engine computes for the same ids, and the reported log-probabilities with
the frequencies of the samples. The tolerance is a multiple of the differences that the engine shows between its own
values for the same ids.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from gymsdk.checks.results import CheckFailed, CheckResult, CheckSkipped, run_check
from gymsdk.checks.sampling import MAX_EVIDENCE, find_undetected, measure_evidence
from gymsdk.models.exact_tokens import ENGINE_SAMPLING
from gymsdk.models.token_calls import TokenCall, build_completion_body
from gymsdk.models.token_scores import post_or_none, score
from gymsdk.responses import TOKEN_FIELDS, read_text
from gymsdk.tokens.chatml import THINK_END, THINK_START
from gymsdk.tokens.tokenizer import Tokenizer, get_vocab_size
from gymsdk.types import Item, Model, is_reply

SAMPLES = 256
"""The number of generations after one prompt. Their frequencies are compared with their log-probabilities."""

SAMPLE_TOKENS = 3
CONCURRENT_SAMPLES = 32
SEQUENCE_TOKENS = 24
"""The length of the generations that the engine scores again."""

LONG_SAMPLES = 4
"""The number of generations. Their tokens are sampled again as first tokens."""

NOISE_FACTOR = 8
"""The tolerance of log-probabilities, as a multiple of the largest difference between two values of the same ids."""

MIN_LIMIT = 1e-4
"""The smallest tolerance. A smaller difference does not matter in training."""

MAX_SPREAD = 0.25
"""The largest difference between two values of the same ids that can be noise: a trainer's importance ratio of 1.28."""

MAX_LIMIT = 0.5
"""The largest tolerance. No token may differ by more."""

MAX_EXCEEDING = 0.5
"""The largest share of tokens that may exceed the tolerance.

In reduced precision most values agree exactly, and a rare large error continues to the end of its generation. Wrong
log-probabilities are wrong for nearly all tokens.
"""

TEXTS = 24
"""The number of generations with a compared text."""

WORDS = "Write one word."
PROMPT: Item = {"input": WORDS, "temperature": 1.0, "top_p": 1.0}
TOPICS = ("rain", "iron", "salt", "wool", "fire", "corn", "snow", "gold")
COOL_TEMPERATURE = 0.5
UNUSUAL_WORD = "then"

REPLACEMENT = "\ufffd"
"""The character in place of bytes that are no character."""

_SPECIAL_TOKEN = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]")
_REASONING_TAGS = re.compile(f"{THINK_START}|{THINK_END}")


@runtime_checkable
class ServedModel(Model, Protocol):
    """A model on a server, with token ids."""

    def build_probe_call(self) -> TokenCall:
        """Return a call with which checks send their own requests."""


Reference: TypeAlias = dict[Any, float]
"""Log-probabilities by position, or by the sampled ids up to the token."""


@dataclass(frozen=True)
class Generation:
    """The answer of the engine to one call."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    text: str


class EngineChecker:
    """Runs the checks of one engine, which build upon each other.

    Args:
        model: The model, with token ids.
        tokenizer: The tokenizer of the trainer; `None` compares only with the engine's own.

    Attributes:
        context: The engine's context length, which limits the long prompt; `None` if it is not known.
        noise: The tolerance of log-probabilities, and where it comes from.
    """

    def __init__(self, model: ServedModel, tokenizer: Tokenizer | None = None) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self.context: int | None = None
        self._limit = MIN_LIMIT
        self._reference_ids: list[int] | None = None
        self._samples: list[Generation] | None = None
        self.noise = f"limit {MIN_LIMIT:.1e}"

    async def check_texts(self) -> str:
        """Compare the text of generations and prompts with that of their ids."""
        samples = await self._sample(TEXTS, SEQUENCE_TOKENS)
        decode = await self._get_decoder(samples[0].ids)
        for sample in samples:
            await self._check_text(sample, decode)
        prompt = await decode(samples[0].prompt)
        if _normalize(WORDS) not in _normalize(prompt):
            raise CheckFailed(f"the ids of a prompt are those of {prompt!r}, which does not contain {WORDS!r}")
        if self._tokenizer is not None:
            return f"{TEXTS} generations, by the given tokenizer"
        await self._check_encoding(decode)
        return f"{TEXTS} generations, by the engine's own tokenizer; pass --tokenizer NAME to compare with a trainer's"

    async def measure_noise(self) -> str:
        """Measure how much the engine's values of the same ids differ from each other, which sets the tolerance."""
        values = defaultdict(list)
        for sample in await self._get_samples():
            for end in range(1, len(sample.ids) + 1):
                values[tuple(sample.ids[:end])].append(sample.logprobs[end - 1])
        repeated = [reported for reported in values.values() if len(reported) > 1]
        spreads = [max(reported) - min(reported) for reported in repeated] + await self._score_twice()
        if not spreads:
            raise CheckSkipped(f"not checked: no token was sampled twice in {SAMPLES} samples")
        spread = max(spreads)
        if spread > MAX_SPREAD:
            raise CheckFailed(
                f"the same token after the same ids has log-probabilities that differ by {spread:.3g}; return the"
                " log-probabilities of the policy, without penalties, masks or another temperature"
            )
        self._limit = min(max(NOISE_FACTOR * spread, MIN_LIMIT), MAX_LIMIT)
        bounds = f", at least {MIN_LIMIT:.0e}, at most {MAX_LIMIT:g}"
        self.noise = f"limit {self._limit:.1e} = {NOISE_FACTOR} x the engine's own spread {spread:.1e}{bounds}"
        return f"{self.noise}; {len(spreads)} tokens"

    async def check_scores(self) -> str:
        """Compare the reported log-probabilities with the engine's scores of the same ids."""
        if not await self._can_score():
            raise CheckSkipped("not checked: this engine gives no prompt log-probabilities")
        pairs: list[tuple[int, float, float]] = []
        for generation in [*await self._generate_sequences(), *await self._continue_unusual_ids()]:
            scored = await self._score([*generation.prompt, *generation.ids])
            # Scores begin with the second id, because nothing precedes the first.
            computed = (scored or [])[len(generation.prompt) - 1 :]
            pairs += zip(itertools.count(1), generation.logprobs, computed, strict=False)
        if not pairs:
            raise CheckSkipped("not checked: this engine gives no log-probabilities of prompts with a generation")
        gaps = [abs(reported - expected) for _, reported, expected in pairs]
        exceeding, is_wrong = self._count_exceeding(gaps)
        if is_wrong:
            number, reported, expected = max(pairs, key=lambda pair: abs(pair[1] - pair[2]))
            raise CheckFailed(
                f"{exceeding} of {len(gaps)} sampled tokens have other log-probabilities than the engine computes for"
                f" the same ids, such as token {number} of a generation: {reported:.6g} instead of {expected:.6g}"
                f" ({self.noise})"
            )
        rest = f", {exceeding} above the limit" if exceeding else ""
        return f"largest difference {max(gaps):.1e} over {len(gaps)} tokens{rest}; {self.noise}"

    async def check_sampling(self) -> str:
        """Compare the reported log-probabilities with the frequencies of the samples."""
        generations = await self._get_samples()
        samples = [[*zip(generation.ids, generation.logprobs, strict=True)] for generation in generations]
        for where, evidence in zip(("first", "later"), measure_evidence(samples, self._limit), strict=True):
            if evidence > MAX_EVIDENCE:
                ratio = f"likelihood ratio e^{evidence:.0f}, limit e^{MAX_EVIDENCE:.0f}"
                reason = "their probabilities add up to more than 1" if math.isinf(evidence) else ratio
                raise CheckFailed(
                    f"the {where} tokens of {SAMPLES} samples do not have the frequencies that their log-probabilities"
                    f" predict ({reason}); return the log-probabilities of the distribution that is sampled"
                )
        first, later = find_undetected(samples, self._limit)
        if first:
            raise CheckSkipped(
                f"not checked: {SAMPLES} samples of this policy cannot show whether its log-probabilities are"
                f" {' or '.join(first)}; its tokens are too certain, or nearly all different"
            )
        unknown = f"; they cannot show whether those of later tokens are {' or '.join(later)}" if later else ""
        return f"{SAMPLES} samples of {SAMPLE_TOKENS} tokens agree with their log-probabilities{unknown}"

    async def find_processing(self) -> str:
        """Find out whether the reported log-probabilities are changed by the sampling settings of a request."""
        samples = await self._get_samples()
        call, fields = self._model.build_probe_call(), {"max_tokens": 1, "temperature": COOL_TEMPERATURE}
        answers = await asyncio.gather(
            *(self._complete(call, samples[0].prompt, fields) for _ in range(CONCURRENT_SAMPLES))
        )
        values = {sample.ids[0]: sample.logprobs[0] for sample in samples}
        if None in answers:
            raise CheckSkipped("not checked: this engine takes no token prompts")
        gaps = [abs(values[token] - value) for pairs in answers for token, value in pairs or () if token in values]
        if not gaps:
            raise CheckSkipped("not checked: no token was sampled with both temperatures")
        if self._count_exceeding(gaps)[1]:
            return f"processed: at temperature {COOL_TEMPERATURE} they are those of the distribution that is sampled"
        return f"raw: at temperature {COOL_TEMPERATURE} they are those of the policy, as at temperature 1"

    async def measure_reference(self) -> Reference:
        """Return values that depend on the weights, to compare before and after an update."""
        # The samples of the old weights would show no change.
        self._samples = None
        if self._reference_ids is None:
            sample = await self._generate(PROMPT | {"max_output_tokens": 1})
            self._reference_ids = [*sample.prompt, *sample.prompt]
        scored = await self._score(self._reference_ids)
        if scored is not None:
            return dict(enumerate(scored))
        samples = await self._get_samples()
        ends = [(sample, end) for sample in samples for end in range(1, len(sample.ids) + 1)]
        return {tuple(sample.ids[:end]): sample.logprobs[end - 1] for sample, end in ends}

    def describe_change(self, before: Reference, after: Reference) -> str:
        """Say how much two references differ.

        Raises:
            CheckFailed: They do not differ by more than the engine's own values of the same ids.
            CheckSkipped: They have no token in common.
        """
        gaps = [abs(before[key] - after[key]) for key in before.keys() & after.keys()]
        if not gaps:
            raise CheckSkipped("not checked: no token was sampled both before and after the update")
        if not self._count_exceeding(gaps)[1]:
            raise CheckFailed(
                f"the log-probabilities change by at most {max(gaps):.1e}, no more than without an update; the server"
                f" has the old weights, or the command sends nearly the same ones ({self.noise})"
            )
        return f"log-probabilities change by up to {max(gaps):.1e}"

    def _count_exceeding(self, gaps: Sequence[float]) -> tuple[int, bool]:
        """Return how many *gaps* exceed the tolerance, and whether these are too many, or one of them is too large."""
        exceeding = sum(gap > self._limit for gap in gaps)
        return exceeding, exceeding > MAX_EXCEEDING * len(gaps) or max(gaps) > MAX_LIMIT

    async def _get_samples(self) -> list[Generation]:
        """Return the samples after one prompt, which are the same for all checks until the next update."""
        if self._samples is None:
            self._samples = await self._sample(SAMPLES, SAMPLE_TOKENS)
        return self._samples

    async def _sample(self, count: int, tokens: int) -> list[Generation]:
        slots = asyncio.Semaphore(CONCURRENT_SAMPLES)

        async def generate() -> Generation:
            async with slots:
                return await self._generate(PROMPT | {"max_output_tokens": tokens})

        return await asyncio.gather(*(generate() for _ in range(count)))

    async def _generate(self, request: Item) -> Generation:
        response = await self._model.respond(request)
        carrier = response["output"][-1]
        if not carrier.get(TOKEN_FIELDS[1]):
            raise CheckFailed("an answer has no token ids")
        prompt, ids, logprobs = (carrier[key] for key in TOKEN_FIELDS)
        return Generation(prompt, ids, logprobs, _join_text(response["output"]))

    async def _generate_sequences(self) -> list[Generation]:
        """Return generations of prompts of different lengths; half of them run alone, and half at the same time."""
        # One prompt is long enough for a prefix cache, which may be older than the weights.
        words = [f"Write a few words about {topic}." for topic in TOPICS]
        words += ["1 2 3 " * min(self.context // 16, 100)] if self.context else []
        requests = [PROMPT | {"input": text, "max_output_tokens": SEQUENCE_TOKENS} for text in words]
        # Kernels may compute a batch with other rounding than a single sequence.
        alone = [await self._generate(request) for request in requests[::2]]
        return [*alone, *await asyncio.gather(*map(self._generate, requests[1::2]))]

    async def _continue_unusual_ids(self) -> list[Generation]:
        """Return a second turn after a turn in an encoding that the tokenizer would not choose.

        An engine that tokenizes the text of the conversation again, and returns the ids that it was sent, computes with
        other ids than it names.
        """
        call = self._model.build_probe_call()
        first = await self._generate(PROMPT | {"max_output_tokens": 1})
        letters = [
            await post_or_none(
                call, "/tokenize", {"model": call.body.get("model"), "prompt": letter, "add_special_tokens": False}
            )
            for letter in UNUSUAL_WORD
        ]
        if not all(isinstance(letter, dict) and letter.get("tokens") for letter in letters):
            return []
        ids = [token for letter in letters for token in letter["tokens"]]
        text = [{"type": "output_text", "text": UNUSUAL_WORD}]
        values: tuple[object, ...] = (first.prompt, ids, [-1.0] * len(ids))
        fields = dict(zip(TOKEN_FIELDS, values, strict=True))
        turn = {"type": "message", "role": "assistant", "content": text} | fields
        conversation = [{"role": "user", "content": WORDS}, turn, {"role": "user", "content": "Write another word."}]
        return [await self._generate(PROMPT | {"input": conversation, "max_output_tokens": SEQUENCE_TOKENS})]

    async def _can_score(self) -> bool:
        return await self._score((await self._get_samples())[0].prompt) is not None

    async def _score(self, ids: Sequence[int]) -> list[float] | None:
        return await score(self._model.build_probe_call(), ids)

    async def _score_twice(self) -> list[float]:
        """Return the differences between scores of the same ids: alone, in a batch, and as part of longer ids."""
        if not await self._can_score():
            return []
        sequences = [[*sequence.prompt, *sequence.ids] for sequence in await self._generate_sequences()]
        alone = [await self._score(ids) for ids in sequences]
        batch = await asyncio.gather(*map(self._score, [*sequences, *(ids * 2 for ids in sequences)]))
        longer = batch[len(sequences) :]
        differences: list[float] = []
        for scores, *all_other_scores in zip(alone, batch, longer, strict=False):
            for other_scores in all_other_scores:
                # Longer ids begin with the same ids.
                differences += [abs(a - b) for a, b in zip(scores or (), other_scores or (), strict=False)]
        return differences + await self._sample_twice()

    async def _sample_twice(self) -> list[float]:
        """Return the differences between tokens that the engine reaches in one generation and as a first token.

        Engines compute prompts and generated tokens with different code. The results differ in reduced precision.
        """
        call, prompt = self._model.build_probe_call(), (await self._get_samples())[0].prompt

        async def compare(generated: list[tuple[int, float]], number: int) -> float | None:
            token, logprob = generated[number]
            before = [*prompt, *(earlier for earlier, _ in generated[:number])]
            repeated = await self._complete(call, before, {"max_tokens": 1, "allowed_token_ids": [token]})
            # With processed log-probabilities the only allowed token has a probability of 1.
            is_same = repeated and repeated[0][0] == token and repeated[0][1] < 0
            return abs(repeated[0][1] - logprob) if repeated and is_same else None

        generations = [await self._complete(call, prompt, {"max_tokens": SEQUENCE_TOKENS}) for _ in range(LONG_SAMPLES)]
        tasks = [
            compare(generated, number) for generated in generations if generated for number in range(len(generated))
        ]
        return [difference for difference in await asyncio.gather(*tasks) if difference is not None]

    async def _complete(self, call: TokenCall, prompt: list[int], fields: Item) -> list[tuple[int, float]] | None:
        """Return the tokens that the engine generates after the ids *prompt*; `None` if it takes no ids."""
        body = build_completion_body(call.body | ENGINE_SAMPLING | fields, prompt, None)
        answer = await post_or_none(call, "completions", body)
        try:
            choice: Item = answer["choices"][0]
            ids: list[int] = choice["token_ids"]
            logprobs: list[float] = choice["logprobs"]["token_logprobs"]
            pairs: list[tuple[int, float]] = [*zip(ids, logprobs, strict=True)]
        except (LookupError, TypeError, ValueError):
            return None
        return pairs

    async def _get_decoder(self, ids: list[int]) -> Callable[[Sequence[int]], Awaitable[str]]:
        """Return a function that decodes ids: with the given tokenizer, else with that of the engine."""
        tokenizer, call = self._tokenizer, self._model.build_probe_call()

        async def decode_locally(sequence: Sequence[int]) -> str:
            assert tokenizer is not None
            return _decode(tokenizer, sequence)

        async def decode_on_server(sequence: Sequence[int]) -> str:
            answer = await post_or_none(call, "/detokenize", {"model": call.body.get("model"), "tokens": [*sequence]})
            if not isinstance(answer, dict) or not isinstance(answer.get("prompt"), str):
                raise CheckFailed("the engine's /detokenize does not accept the ids that the engine returned")
            return str(answer["prompt"])

        if tokenizer is not None:
            return decode_locally
        try:
            await decode_on_server(await self._encode("a") or ids)
        except CheckFailed:
            raise CheckSkipped("not checked: this engine has no /detokenize; pass --tokenizer NAME") from None
        return decode_on_server

    async def _encode(self, text: str) -> list[int] | None:
        call = self._model.build_probe_call()
        body = {"model": call.body.get("model"), "prompt": text, "add_special_tokens": False}
        answer = await post_or_none(call, "/tokenize", body)
        return answer.get("tokens") if isinstance(answer, dict) else None

    async def _check_encoding(self, decode: Callable[[Sequence[int]], Awaitable[str]]) -> None:
        ids = await self._encode(WORDS)
        if ids is not None and _normalize(text := await decode(ids)) != _normalize(WORDS):
            raise CheckFailed(f"the engine's /tokenize encodes {WORDS!r} as ids whose text is {text!r}")

    async def _check_text(self, sample: Generation, decode: Callable[[Sequence[int]], Awaitable[str]]) -> None:
        text = await decode(sample.ids)
        if _normalize(text) == _normalize(sample.text):
            return
        has_reasoning = THINK_START in text or THINK_END in text
        pieces = [await decode([token]) for token in dict.fromkeys(sample.ids)]
        special = [piece for piece in pieces if _SPECIAL_TOKEN.fullmatch(piece.strip())]
        for piece in special:
            text = text.replace(piece, "")
        expected, returned = _normalize(text, special), _normalize(sample.text, special)
        if REPLACEMENT in text + sample.text:
            # Decoding token by token, as engines do, may join the bytes of invalid characters in another way.
            expected, returned = (value.encode("ascii", "ignore").decode() for value in (expected, returned))
        if has_reasoning:
            # Engines return reasoning apart, also from the middle of a text.
            expected, returned = "".join(sorted(expected)), "".join(sorted(returned))
        if expected != returned:
            raise CheckFailed(f"the engine returned the text {sample.text!r} with the ids of {text!r}")


async def check_engine(model: ServedModel, tokenizer: Tokenizer | None = None) -> list[CheckResult]:
    """Return the results of the checks of a model's engine."""
    checker = EngineChecker(model, tokenizer)
    return [await run_check(2, name, check) for name, check in list_checks(checker)]


def list_checks(checker: EngineChecker) -> list[tuple[str, Callable[[], Awaitable[str]]]]:
    """Return the checks of *checker* in their order, with their names."""
    return [
        ("returns the text of the sampled ids", checker.check_texts),
        ("gives one token of one prompt one log-probability", checker.measure_noise),
        ("computes the same log-probabilities for given ids", checker.check_scores),
        ("samples with the log-probabilities that it reports", checker.check_sampling),
        ("reports raw or processed log-probabilities", checker.find_processing),
    ]


def _decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    size = get_vocab_size(tokenizer)
    if wrong := [token for token in ids if token < 0 or (size is not None and token >= size)]:
        raise CheckFailed(f"the engine returned the id {wrong[0]}, which the given tokenizer does not have")
    return tokenizer.decode([*ids])


def _join_text(output: Iterable[Item]) -> str:
    """Return all text of an answer, with its reasoning first."""
    texts = []
    for item in output:
        if item.get("type") == "reasoning":
            texts += [read_text(item.get("summary")), read_text(item.get("content"))]
        elif is_reply(item):
            texts.append(read_text(item.get("content")))
    return "".join(texts)


def _normalize(text: str, special: Iterable[str] = ()) -> str:
    """Return *text* without what engines add or leave out: white space, reasoning tags, parts of characters."""
    for piece in special:
        text = text.replace(piece, "")
    return "".join(_REASONING_TAGS.sub("", text).replace(REPLACEMENT, "").split())
