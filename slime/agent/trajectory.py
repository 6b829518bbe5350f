"""The turns of an agent's conversations, and the samples that are made of them.

An agent program sends its whole conversation with every request. The requests of a session are kept as a tree of messages: a
conversation that goes on makes a path longer; one that differs from it (a summary in place of its beginning, a sub-agent)
branches off. Each leaf gives a chain of turns, and each chain is folded into as few samples as its token ids allow. The
model's answers keep the ids and log-probs that the engine gave, and each is trained once.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slime.utils.sample_fields import held
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

FORK_THRESHOLD_TOKENS = 1024
Message = dict[str, Any]
_STATUS = {"length": Sample.Status.TRUNCATED, "abort": Sample.Status.ABORTED}


@dataclass(frozen=True)
class TurnRecord:
    """An answer of the model, as the engine gave it. Arrays and tensors become lists.

    Attributes:
        prompt_ids: ids that were sent.
        output_ids: ids that came back.
        finish_reason: `stop`, `length` or `abort`; of the engine's dict, its `type`.
        output_log_probs: as many as `output_ids`, or none if they are not known.
        ill_formed: the answer has a tool call that cannot be read.
        weight_version: version of the weights that generated it.
        meta_info: the engine's, from which `Sample.append_response_tokens` takes routed experts, kept sets and counters.

    Raises:
        ValueError: there are log-probs, but not one per output id.
    """

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    finish_reason: str
    output_log_probs: Sequence[float] = field(default_factory=list)
    ill_formed: bool = False
    weight_version: str | None = None
    meta_info: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        plain = {
            name: value.tolist()
            for name, value in vars(self).items()
            if name in ("prompt_ids", "output_ids", "output_log_probs") and hasattr(value, "tolist")
        }
        if isinstance(self.finish_reason, dict):
            plain["finish_reason"] = self.finish_reason.get("type", "stop")
        for name, value in plain.items():
            # The class is frozen.
            object.__setattr__(self, name, value)
        if len(self.output_log_probs) not in (0, len(self.output_ids)):
            raise ValueError(f"a turn has {len(self.output_log_probs)} log-probs for {len(self.output_ids)} output ids")


@dataclass(eq=False)
class _Node:
    """A message of the tree; one that the model wrote has its turn. Nodes are compared by identity, not by content."""

    message: Message
    parent: _Node | None = None
    turn: TurnRecord | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    is_trained: bool = True
    children: list[_Node] = field(default_factory=list)

    def add(self, message: Message, **turn_fields: Any) -> _Node:
        self.children.append(_Node(dict(message), self, **turn_fields))
        return self.children[-1]


@dataclass(eq=False)
class _Session:
    root: _Node = field(default_factory=lambda: _Node({}))
    turns: list[_Node] = field(default_factory=list)

    def path(self, messages: Iterable[Message]) -> list[_Node]:
        """The nodes of the longest prefix of `messages` that is in the tree; of equal siblings, the one that was added last."""
        found, node = [], self.root
        for message in messages:
            node = next((child for child in reversed(node.children) if child.message == message), None)
            if node is None:
                break
            found.append(node)
        return found

    def chains(self) -> list[list[_Node]]:
        """The turns on the path to each leaf, in the order in which the leaves were added."""
        chains = []
        for leaf in [node for node in self.turns if not node.children]:
            chain, node = [], leaf
            while node is not None:
                chain += [node] if node.turn is not None else []
                node = node.parent
            chains.append(chain[::-1])
        return chains


class TrajectoryManager:
    """Records the turns of sessions, and makes samples of them. Its methods may be called from any thread.

    Attributes:
        counts: how many drafts did not become samples, by reason (`nothing_to_train`, `no_response`), how many samples were
            `cut`, and how many began (`forks`) because a prompt did not go on with the one before; how many turns are not
            trained because a prompt has other tokens in their place (`masked_turns`), or because the client has replaced their
            messages (`rewritten_turns`).
    """

    def __init__(self, fork_threshold_tokens: int = FORK_THRESHOLD_TOKENS) -> None:
        self._threshold = fork_threshold_tokens
        self._sessions: dict[str, _Session] = {}
        # Held while a tree is walked through. Samples are made without it, of a session that has been taken out.
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    def has_session(self, sid: str) -> bool:
        """Whether turns of this session are held."""
        with self._lock:
            return sid in self._sessions

    def turn_count(self, sid: str) -> int:
        """How many turns of this session are held."""
        with self._lock:
            return len(self._sessions[sid].turns) if sid in self._sessions else 0

    def recorded_turns(self, sid: str, messages: Sequence[Message]) -> list[tuple[int, TurnRecord]]:
        """(place in `messages`, turn) of every message that the model wrote and the client has not changed since."""
        with self._lock:
            path = self._sessions[sid].path(messages) if sid in self._sessions else []
            return [(place, node.turn) for place, node in enumerate(path) if node.turn is not None and node.is_trained]

    def record_turn(
        self,
        sid: str,
        *,
        turn: TurnRecord,
        prompt_messages: Sequence[Message],
        response_message: Message,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """Put a turn behind the messages that it answers.

        If a client repeats the model's last message in a changed form, the chain may go on: the message is replaced, and its
        turn is no longer trained. That happens if it is the only answer at its place, nothing follows it yet, and it has fewer
        output tokens than the threshold. Otherwise the conversation branches.
        """
        with self._lock:
            session = self._sessions.setdefault(sid, _Session())
            path = session.path(prompt_messages)
            node, rest = (path[-1] if path else session.root), list(prompt_messages[len(path) :])
            answers = [child for child in node.children if child.message.get("role") == "assistant"]
            leaves = [child for child in answers if child.turn is not None and not child.children]
            is_short = len(answers) == len(leaves) == 1 and len(leaves[0].turn.output_ids) < self._threshold
            if is_short and rest and rest[0].get("role") == "assistant":
                node = leaves[0]
                node.message, node.is_trained = dict(rest.pop(0)), False
                self.counts["rewritten_turns"] += 1
            for message in rest:
                node = node.add(message)
            session.turns.append(node.add(response_message, turn=turn, metadata=dict(metadata or {})))

    def get_trajectory(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: float | dict[str, Any] | None = 0.0,
        extra_metadata: dict[str, Any] | None = None,
        max_sample_tokens: int = 0,
        args: Any = None,
    ) -> list[Sample]:
        """Remove a session, and return its samples: siblings of one execution, each with the full reward.

        Args:
            base_sample: gives index, group, prompt, label, metadata and the execution's id (its index, if it has none).
            extra_metadata: overrides that of `base_sample` and of the turns.
            max_sample_tokens: a longer sample is cut there and TRUNCATED; 0 for no limit.
            args: those of the run, for the shape of routed experts; needed if `meta_info` of turns has these.

        Raises:
            ValueError: log-probs are no finite numbers, or `meta_info` does not fit its turn's tokens.
        """
        with self._lock:
            session = self._sessions.pop(sid, None) or _Session()
        drafts: list[_Draft] = []
        samples, trained, counts = [], set(), Counter()
        for chain in session.chains():
            first_of_chain = len(drafts)
            for node in chain:
                if len(drafts) == first_of_chain or not drafts[-1].goes_on(node, self._threshold):
                    counts["forks"] += len(drafts) > first_of_chain
                    drafts.append(_Draft(node))
        for draft in drafts:
            if 0 < max_sample_tokens <= len(draft.prompt_ids) or len(draft.tokens) == len(draft.prompt_ids):
                counts["no_response"] += 1
                continue
            sample = draft.sample(base_sample, trained, args)
            sample.reward, sample.session_id = copy.copy(reward), sid
            if 0 < max_sample_tokens < len(draft.tokens):
                _cut(sample, max_sample_tokens)
                counts["cut"] += 1
            if not sample.effective_response_length:
                counts["nothing_to_train"] += 1
                continue
            sample.metadata |= extra_metadata or {}
            sample.metadata["truncated"] = sample.truncated
            samples.append(sample)
        replaced = {node for draft in drafts for node in draft.replaced if node.is_trained}
        counts["masked_turns"] = len(replaced - trained)
        # Without what did not happen.
        counts = +counts
        if counts:
            logger.info("%d samples of %d turns; %s", len(samples), len(session.turns), dict(counts))
        with self._lock:
            self.counts.update(counts)
        return samples

    def drop_session(self, sid: str) -> None:
        """Forget a session and its turns."""
        with self._lock:
            self._sessions.pop(sid, None)


class _Draft:
    """A sample in the making: a prompt, followed by stretches of context and of the model's output."""

    def __init__(self, node: _Node) -> None:
        self.prompt_ids = list(node.turn.prompt_ids)
        self.tokens = list(self.prompt_ids)
        self.turns: list[_Node] = []
        # Those of the turns whose output a later prompt has otherwise.
        self.replaced: list[_Node] = []
        # (ids, the node whose output they are; None for context).
        self.stretches: list[tuple[list[int], _Node | None]] = []
        self._append([], node)

    def goes_on(self, node: _Node, threshold: int) -> bool:
        """Append a turn, and the context before it, and return True; return False if its prompt does not continue this draft.

        If the prompt differs only within the last output, and the turn's own output is short, the prompt replaces that output,
        as context. A turn without output adds no tokens: its prompt may have left no room for an answer.
        """
        prompt, turn = list(node.turn.prompt_ids), node.turn
        if not turn.output_ids:
            self.turns.append(node)
            return True
        start = len(self.tokens) - len(self.stretches[-1][0])
        if prompt[: len(self.tokens)] == self.tokens:
            self._append(prompt[len(self.tokens) :], node)
        elif prompt[:start] == self.tokens[:start] and len(turn.output_ids) < threshold:
            self.replaced.append(self.stretches.pop()[1])
            del self.tokens[start:]
            self._append(prompt[start:], node)
        else:
            return False
        return True

    def _append(self, context: list[int], node: _Node) -> None:
        self.stretches += [(context, None), (list(node.turn.output_ids), node)]
        self.tokens += context + self.stretches[-1][0]
        self.turns.append(node)

    def sample(self, base: Sample, trained: set[_Node], args: Any) -> Sample:
        """The sample. Its turns are added to `trained`; turns that are in it already get mask 0."""
        sample = Sample(
            group_index=base.group_index,
            index=base.index,
            rollout_id=base.index if base.rollout_id is None else base.rollout_id,
            prompt=base.prompt,
            tokens=self.prompt_ids,
            label=base.label,
            metadata=copy.copy(base.metadata),
            train_metadata=copy.copy(base.train_metadata),
            custom_rm_path=base.custom_rm_path,
            generate_function_path=base.generate_function_path,
        )
        has_log_probs = True
        for ids, node in self.stretches:
            if node is None or not node.is_trained or node in trained:
                sample.append_response_tokens(args, tokens=ids, trainable=False)
                continue
            trained.add(node)
            turn = node.turn
            has_log_probs &= len(turn.output_log_probs) == len(ids)
            info = {**(turn.meta_info or {}), "finish_reason": {"type": turn.finish_reason}}
            if turn.weight_version is not None:
                info["weight_version"] = turn.weight_version
            log_probs = list(turn.output_log_probs) or [0.0] * len(ids)
            sample.append_response_tokens(args, tokens=ids, log_probs=log_probs, meta_info=info)
        if not has_log_probs:
            # The zeros must not be taken for log-probs of the engine.
            sample.rollout_log_probs = None
        sample.status = _STATUS.get(self.turns[-1].turn.finish_reason, Sample.Status.COMPLETED)
        for node in self.turns:
            sample.metadata |= node.metadata
        sample.metadata |= {
            "round_number": len(self.turns),
            "use_tool": any(bool(node.message.get("tool_calls")) for node in self.turns),
            "ill_formed": any(node.turn.ill_formed for node in self.turns),
        }
        return sample


def _cut(sample: Sample, limit: int) -> None:
    """Keep the first `limit` tokens, of which at least one is of the response."""
    removed = len(held(sample, "tokens")) - limit
    sample.response_length -= removed
    length = sample.response_length
    sample.tokens = sample.tokens[:limit]
    sample.loss_mask = sample.loss_mask[:length]
    if sample.rollout_log_probs is not None:
        sample.rollout_log_probs = sample.rollout_log_probs[:length]
    if sample.rollout_top_p_token_offsets is not None:
        sample.rollout_top_p_token_offsets = np.asarray(sample.rollout_top_p_token_offsets[: length + 1])
        sample.rollout_top_p_token_ids = sample.rollout_top_p_token_ids[: sample.rollout_top_p_token_offsets[-1]]
    if sample.rollout_routed_experts is not None:
        sample.rollout_routed_experts = sample.rollout_routed_experts[: limit - 1]
    sample.weight_version_spans = [
        (version, start, min(end, length)) for version, start, end in sample.weight_version_spans if start < length
    ]
    sample.status = Sample.Status.TRUNCATED
    sample.validate_lengths()
