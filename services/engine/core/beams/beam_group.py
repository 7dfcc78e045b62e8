"""Beam groups: the sequences that compute one beam search, and the requested sequences that wait for its results.

    members   the sequences that were added: each returns one of the finished hypotheses (`BeamParams.rank`). They have
              no row and no KV blocks, and are in no queue
    beams     the sequences that the scheduler computes. At first there is one, the leader, which computes the prompt;
              after its first step there are `width`, one for each running hypothesis

Members of one sequence group with the same prompt and parameters share one search, even if a member arrives while the
search runs. The result depends only on prompt and parameters. So if the siblings of a member are on another engine, or
a member arrives after the search has ended, it gets the hypothesis of its rank from a separate search.

All beams have the same length. When every beam has reported its candidates, the search takes a step and `rearrange`
gives each beam the tokens and KV blocks of the hypothesis that it runs now. Called by `core`.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import msgspec

from antiphon.services.engine.core.beams.beam_search import BeamSearch, Finished, num_candidates
from antiphon.services.engine.core.kv.block_pool import BlockPool
from antiphon.services.engine.core.kv.windows import Windows
from antiphon.services.engine.core.plan import NewSequence, SampledLogprobs
from antiphon.services.engine.core.request import Outcome, SequenceSpec
from antiphon.services.engine.core.sequence import Sequence, from_spec
from antiphon.services.engine.core.stopping import StopRules
from antiphon.shared.parameters.sampling import BeamParams

_Key = tuple[str, bytes, tuple[int, ...], bytes]


@dataclass(slots=True, eq=False, kw_only=True)
class BeamGroup:
    """One beam search with its members and beams."""

    key: _Key
    params: BeamParams
    rules: StopRules
    beams: list[Sequence]
    """The scheduler shortens this list to the leader when it preempts the group; the search then begins anew."""
    members: list[Sequence] = field(default_factory=list[Sequence])
    search: BeamSearch = field(init=False)
    _reports: dict[int, SampledLogprobs] = field(default_factory=dict[int, SampledLogprobs])
    """The candidates of the current step, by number of the beam."""

    def __post_init__(self) -> None:
        self.search = BeamSearch(self.params, self.rules)

    @property
    def leader(self) -> Sequence:
        """The first beam, which exists as long as the group."""
        return self.beams[0]

    def report(self, beam: Sequence, logprobs: SampledLogprobs) -> list[int] | None:
        """Adds the candidates of one beam. When all beams have reported, the search takes its step.

        Returns the step's result (see `BeamSearch.advance`); None if beams have yet to report.
        """
        if beam.num_output_tokens == 0:
            self.search = BeamSearch(self.params, self.rules)
            self._reports.clear()
        self._reports[self.beams.index(beam)] = logprobs
        if len(self._reports) < len(self.beams):
            return None
        reports = [self._reports[number] for number in range(len(self.beams))]
        self._reports.clear()
        return self.search.advance(reports)

    def new_tokens(self) -> list[int]:
        """Returns the last token of each running hypothesis."""
        return [hypothesis.token_id for hypothesis in self.search.running]

    def outcomes(self) -> list[Outcome]:
        """Returns the result of each member. The search must be over."""
        return [self._outcome(member, self.search.finished[_beam_params(member).rank]) for member in self.members]

    def _outcome(self, member: Sequence, finished: Finished) -> Outcome:
        """Returns a member's result without the tokens that it came with: another engine has already reported them.

        If the hypothesis does not begin with these tokens, the member's result is an error.
        """
        token_ids, logprobs = finished.hypothesis.tokens()
        carried = member.num_carried_tokens
        same = token_ids[:carried] == tuple(member.tokens[member.num_prompt_tokens :])
        num_logprobs, token_ids, logprobs = member.params.logprobs, token_ids[carried:], logprobs[carried:]
        verdict = finished.verdict
        return Outcome(
            sequence_id=member.sequence_id,
            position=carried,
            token_ids=token_ids if same else (),
            logprobs=tuple(_first(one, num_logprobs) for one in logprobs) if num_logprobs is not None and same else (),
            cumulative_logprob=sum(one.logprob for one in logprobs) if same else 0.0,
            finish_reason=verdict.reason if same else "error",
            stop_token_id=verdict.stop_token_id if same else None,
            num_cached_tokens=self.leader.num_cached_tokens,
            first_scheduled_step=self.leader.first_scheduled_step,
        )


class BeamGroups:
    """The beam groups of a core."""

    def __init__(self, block_size: int, vocab_size: int) -> None:
        self._block_size, self._vocab_size = block_size, vocab_size
        self._by_id: dict[str, BeamGroup] = {}
        """The groups, by the sequence id that all beams of a group share."""
        self._by_key: dict[_Key, BeamGroup] = {}
        self._by_member: dict[str, BeamGroup] = {}

    def __iter__(self) -> Iterator[BeamGroup]:
        return iter(self._by_id.values())

    def group_of(self, beam: Sequence) -> BeamGroup:
        """Returns the group of a beam."""
        return self._by_id[beam.sequence_id]

    def join(self, member: Sequence, spec: SequenceSpec, number: int) -> BeamGroup | None:
        """Adds a member to the group of its siblings. Returns the group if it is new: its leader must then be queued.

        The beams of a new group get consecutive ages, beginning with `number`.
        """
        group, is_new = self._by_key.get(_key(spec)), False
        if group is None:
            group, is_new = self._new_group(member, spec, number), True
            self._by_id[group.leader.sequence_id] = self._by_key[group.key] = group
        group.members.append(member)
        self._by_member[member.sequence_id] = group
        return group if is_new else None

    def leave(self, member: Sequence) -> BeamGroup | None:
        """Removes a member.

        Returns its group if this was the last member; the caller must then end the group's beams.
        """
        group = self._by_member.pop(member.sequence_id)
        group.members.remove(member)
        if group.members:
            return None
        del self._by_id[group.leader.sequence_id], self._by_key[group.key]
        return group

    def joined(self, new: NewSequence) -> list[str]:
        """Returns the ids of the members whose leader joins in a plan; none for a beam whose tokens are rewritten."""
        group = self._by_id.get(new.sequence_id) if len(new.token_ids) == new.num_prompt_tokens else None
        return [] if group is None else [member.sequence_id for member in group.members]

    def _new_group(self, member: Sequence, spec: SequenceSpec, number: int) -> BeamGroup:
        params = _beam_params(member)
        candidates = max(num_candidates(params, member.rules), spec.params.logprobs or 0)
        of_beams = msgspec.structs.replace(spec.params, logprobs=candidates)
        # The number makes the id unique: beams of a group that has ended may still be in flight when later siblings
        # start the same search again.
        name = f"{spec.sequence_id} beams {number}"
        leader_spec = replace(spec, sequence_id=name, params=of_beams, output_token_ids=(), sequence_group="")
        leader = from_spec(leader_spec, member.rules, number, self._block_size, self._vocab_size)
        leader.beams, leader.num_rows = [leader], params.width
        leader.whole_images = member.whole_images
        return BeamGroup(key=_key(spec), params=params, rules=member.rules, beams=leader.beams)


def further_beams(group: BeamGroup) -> list[Sequence]:
    """Returns the beams that a group gets after its first step: `width` - 1, without tokens, row and blocks."""
    leader = group.leader
    priority, arrival, number = leader.age
    return [
        Sequence(
            sequence_id=leader.sequence_id,
            params=leader.params,
            rules=leader.rules,
            tokens=array("I"),
            num_prompt_tokens=leader.num_prompt_tokens,
            num_carried_tokens=0,
            age=(priority, arrival, number + offset),
            cache_salt=leader.cache_salt,
            sequence_group="",
            block_hashes=[],
            beams=group.beams,
            priority=leader.priority,
            client=leader.client,
            client_weight=leader.client_weight,
            client_priority=leader.client_priority,
            adapter=leader.adapter,
            prompt_adapter=leader.prompt_adapter,
            images=leader.images,
            idle_until_s=leader.idle_until_s,
        )
        for offset in range(1, group.params.width)
    ]


def begin_anew(beams: list[Sequence], size: int) -> None:
    """Leaves only the leader, with its prompt as its only tokens. The others have ended. `size`: see `rearrange`."""
    leader = beams[0]
    del beams[1:]
    del leader.tokens[leader.num_prompt_tokens :]
    del leader.block_hashes[leader.num_prompt_tokens // size :]
    leader.copied_block, leader.copied_window = None, ()


def rearrange(
    beams: list[Sequence], sources: list[int], token_ids: list[int], pool: BlockPool, windows: Windows, size: int
) -> None:
    """Makes beam i continue what beam `sources[i]` has computed, with `token_ids[i]` as the next token.

    No beam may be in flight. Beams that continue the same source share its full blocks of `size` tokens. The first of
    them also takes over its partly filled block; each other one gets a copy of that block when it is scheduled.
    """
    before = [(one.tokens, one.block_table, one.block_hashes, one.num_published_blocks) for one in beams]
    columns = [(one.window_blocks, one.window_first) for one in beams]
    num_full, rest = divmod(len(before[sources[0]][0]), size)
    has_heir: set[int] = set()
    for beam, source, token_id in zip(beams, sources, token_ids, strict=True):
        tokens, table, hashes, num_published = before[source]
        inherits = rest > 0 and source not in has_heir
        has_heir.add(source)
        beam.tokens = tokens + array("I", (token_id,))
        beam.block_table = table[: num_full + inherits]
        beam.copied_block = table[num_full] if rest and not inherits else None
        beam.block_hashes, beam.num_published_blocks = list(hashes), num_published
        beam.window_blocks, beam.window_first = columns[source]
        beam.copied_window = windows.cut(beam, len(beam.block_table), with_next=beam.copied_block is not None)
        pool.share(beam.block_table)
        pool.share(beam.window_blocks)
        beam.start_at(len(tokens))
    for (_, table, _, _), (blocks, _) in zip(before, columns, strict=True):
        pool.free(table)
        pool.free(blocks)


def _key(spec: SequenceSpec) -> _Key:
    """Returns the key of a search, which all its members have in common."""
    assert spec.params.beam is not None
    beam = msgspec.structs.replace(spec.params.beam, rank=0)
    params = msgspec.structs.replace(spec.params, beam=beam)
    group = spec.sequence_group or spec.sequence_id
    return group, spec.cache_salt, spec.prompt_token_ids, msgspec.msgpack.encode(params)


def _beam_params(member: Sequence) -> BeamParams:
    assert member.params.beam is not None
    return member.params.beam


def _first(logprobs: SampledLogprobs, count: int) -> SampledLogprobs:
    return SampledLogprobs(logprobs.logprob, logprobs.top_token_ids[:count], logprobs.top_logprobs[:count])
