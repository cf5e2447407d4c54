"""The faults: where they are planted, what they break, and which program fails on them.

Not in the list, because no program here can notice them:
- what makes only faster: which stream the copy of the own shard goes by, in which order peers are
  visited, that adjoining copies go out in one call;
- what is tried again: a ticket of memory that lies where new memory does is withdrawn before the
  new one is posted; without that, opening fails until the group's thread has looked, and is tried
  again;
- what another rule covers: whether an acknowledgement of a later operation counts for this one. Its
  rank has left this one, which then has a verdict, and a proposal after that is lost;
- csrc/backend, whose programs need torch and take a minute to build: the suite's own tests are
  the check there (chain_order, results, coalesced_gathers, tests/group).
"""

from __future__ import annotations

from dataclasses import dataclass

from programs import (
    AGREE,
    ARRIVAL,
    LATE,
    LATE_STREAMS,
    LEFT,
    MAKINGS,
    MANY_OUTPUTS,
    MISMATCH,
    PATIENCE,
    PEERS,
    STAGED,
    STREAMS,
    SUMS,
    TICKETS,
    WAITS,
    Program,
    check,
    closing,
    late,
    leaving,
)


@dataclass(frozen=True)
class Fault:
    file: str  # anywhere under csrc
    breaks: str
    old: str  # occurs once in the file
    new: str
    noticed_by: Program

    def __str__(self) -> str:
        return f"{self.file}: {self.breaks}"


FAULTS = [
    # -- the agreement
    Fault(
        "protocol.h",
        "a slot is taken one operation before all have consumed what is in it",
        "if (page.consumed(cursor_) < Verdict::unpack(occupant_).number)",
        "if (page.consumed(cursor_) + 1 < Verdict::unpack(occupant_).number)",
        AGREE,
    ),
    Fault(
        "protocol.h",
        "a rank that was lapped waits for a verdict that has gone",
        "return seen.number >= number_ ? take(seen) : Progress::kBlocked;",
        "return seen.number == number_ ? take(seen) : Progress::kBlocked;",
        AGREE,
    ),
    Fault(
        "protocol.h",
        "a rank takes its own proposal for the verdict that another was faster with",
        "    return to(State::kReadVerdict);\n  }\n\n  Progress read_verdict",
        "    return take(proposal_);\n  }\n\n  Progress read_verdict",
        AGREE,
    ),
    Fault(
        "protocol.h",
        "a rank whose own memory nobody reaches defers the operation",
        "defer && reachable ?",
        "defer ?",
        late("first"),
    ),
    # -- the order of arrival
    Fault(
        "late_protocol.h",
        "a slot is taken while a rank has yet to read what was carried there",
        "if (page.caught_up(rank) < occupant) return false;",
        "if (page.caught_up(rank) + 1 < occupant) return false;",
        ARRIVAL,
    ),
    Fault(
        "late_protocol.h",
        "who joins forgets those before it",
        "Arrived{number_, before() | own_bit()}.pack()",
        "Arrived{number_, own_bit()}.pack()",
        ARRIVAL,
    ),
    Fault(
        "late_protocol.h",
        "who lost the race for the word joins by what it saw before",
        "      return to(State::kLook);\n    }\n    earlier_",
        "      return to(State::kJoin);\n    }\n    earlier_",
        ARRIVAL,
    ),
    # -- for how long to wait
    Fault(
        "wait_policy.h",
        "one more wait in vain than is said",
        "kind_ == Kind::kFixed ? 1 : kSteadily)",
        "kind_ == Kind::kFixed ? 1 : kSteadily + 1)",
        WAITS,
    ),
    Fault(
        "wait_policy.cpp",
        "a host waits no longer than the least, whatever a second copy costs",
        "std::max(idle_end, now + second_copy_)",
        "idle_end",
        WAITS,
    ),
    Fault(
        "agreement.cpp",
        "a stream that is busy is taken for idle",
        "return !before->passed();",
        "return false;",
        PATIENCE,
    ),
    # -- gathers
    Fault(
        "copies.cpp",
        "nobody waits until its peers have copied",
        "  write.await_all_done();\n  return write.take();\n}\n\nProgram",
        "  return write.take();\n}\n\nProgram",
        STREAMS,
    ),
    Fault(
        "copies.cpp",
        "a shard is pushed before the peer has come to the call",
        "    write.await_ready(peer, track);\n",
        "",
        STREAMS,
    ),
    Fault(
        "agreement.cpp",
        "a peer's memory is taken to lie at the export's begin",
        "found.base + place.offset",
        "found.base",
        STREAMS,
    ),
    Fault(
        "direct_transport.cpp",
        "nobody watches over a gather",
        "if (watchdog_ && !operation.trial) {",
        "if (watchdog_ && operation.trial) {",
        LEFT,
    ),
    Fault(
        "exchange.cpp",
        "a late rank pulls a peer's first shard",
        "writes ? static_cast<size_t>(peer) * piece.bytes : 0",
        "0",
        LATE_STREAMS,
    ),
    Fault(
        "staged.cpp",
        "staging buffers are filled anew before all have read them",
        "std::min(chunks.size(), emptied + lead_)",
        "std::min(chunks.size(), emptied + lead_ + 1)",
        STAGED,
    ),
    # -- late gathers
    Fault(
        "late.cpp",
        "peers read the own shard before it lies in its place",
        "write.copy_own(all);",
        "write.copy_own(all, Step::kBeside);",
        LATE,
    ),
    Fault(
        "agreement.cpp",
        "the tickets that late ranks need are withdrawn",
        "  services_.memory.keep_tickets(operation.number);\n",
        "",
        late("held", "unmapped", "parts", "tickets"),
    ),
    Fault(
        "agreement.cpp",
        "a late rank gives up at once what others count on",
        "open(draft, peer, PeerMemory::kStubbornly);",
        "open(draft, peer, std::chrono::milliseconds(0));",
        late("retry"),
    ),
    Fault(
        "late.cpp",
        "who carries in order of arrival does not wait for the later ones",
        "  write.await_all_done();\n",
        "",
        LATE_STREAMS,
    ),
    Fault(
        "agreement.cpp",
        "a contradiction of a late call is not told",
        "if (protocol.turn() == Turn::kBroken) {",
        "if (false) {",
        MISMATCH,
    ),
    # -- what is shared, and when it is given back
    Fault(
        "peer_memory.cpp",
        "imports are closed one operation early",
        "done >= std::min(import.last_use, last_direct_)",
        "done + 1 >= std::min(import.last_use, last_direct_)",
        late("held"),
    ),
    Fault(
        "peer_memory.cpp",
        "a ticket that late ranks look for makes room for another",
        "if (page_.done(static_cast<int>(rank)) < posted.kept_for) return true;",
        "",
        late("held", "unmapped", "parts", "tickets"),
    ),
    Fault(
        "peer_memory.cpp",
        "what was freed is not looked for",
        "      withdraw_some_tickets();\n",
        "",
        MANY_OUTPUTS,
    ),
    Fault(
        "closing.cpp",
        "no operation makes a moment to close in",
        "return !unused_.empty() && Clock::now() >= make_room_at_;",
        "return false;",
        closing("makes"),
    ),
    Fault(
        "closing.cpp",
        "peers' memory is closed while a stream waits",
        "    all = idle();\n",
        "    all = true;\n",
        closing("waits"),
    ),
    # -- ends
    Fault(
        "peers.cpp",
        "a process that cannot be watched is taken for ended",
        "if (descriptor_ >= 0 || errno == ESRCH) return;",
        "if (descriptor_ >= 0 || errno != 0) return;",
        PEERS,
    ),
    Fault(
        "control_page_tickets.cpp",
        "tickets that lie behind their home are not found",
        "    own.ticket_reach = std::max<uint64_t>(own.ticket_reach, i);\n",
        "",
        TICKETS,
    ),
    Fault(
        "control_page_tickets.cpp",
        "nobody hears that a ticket has replaced another",
        "    ++own.tickets_withdrawn;\n",
        "",
        TICKETS,
    ),
    Fault(
        "direct_transport.cpp",
        "a rank that leaves does not wait for what it has enqueued",
        "while (!watchdog_->idle() && !health_.broken()",
        "while (false && !watchdog_->idle() && !health_.broken()",
        leaving("backlog"),
    ),
    Fault(
        "roll_call.cpp",
        "nobody hears that a rank has given up",
        "    board_->post(failure_of(options_.rank, vote), why);\n",
        "",
        MAKINGS,
    ),
    Fault(
        "watchdog.cpp",
        "a rank that has departed with its copies still to run is taken for gone",
        "page_.departed(rank) && page_.consumed(rank) < operation.number;",
        "page_.departed(rank);",
        leaving("departed"),
    ),
    Fault(
        "watchdog.cpp",
        "a rank that has departed without the call is waited for",
        "page_.departed(rank) && page_.consumed(rank) < operation.number;",
        "false;",
        LEFT,
    ),
    # -- sums
    Fault(
        "reduce.cpp",
        "a slice lands where the one before has yet to be summed",
        "if (n >= buffers)",
        "if (n > buffers)",
        SUMS,
    ),
    Fault(
        "reduce.cpp",
        "the caller does not wait for the last sum",
        "  if (!chunks.empty()) write.add(Step::join((chunks.size() - 1) % buffers));\n",
        "",
        SUMS,
    ),
    # -- the engine
    Fault(
        "imports.cpp",
        "a chunk's handle is never released",
        "  library_.release_allocation(handle);\n",
        "",
        check("many_chunks_arrive_in_order"),
    ),
    Fault(
        "imports.cpp",
        "a chunk that another export uses is unmapped",
        "if (--found->second.users > 0) continue;",
        "--found->second.users;",
        check("a_chunk_is_mapped_once_whatever_the_exports"),
    ),
    Fault(
        "exports.cpp",
        "memory that was freed and allocated again is taken for the same",
        "if (ids_at(piece.base) != piece.ids) return false;",
        "",
        check("freed_memory_is_another_export"),
    ),
    Fault(
        "exports.cpp",
        "an owner keeps a chunk's handle",
        "    library_.release_allocation(handle);\n",
        "",
        check("many_chunks_arrive_in_order"),
    ),
    Fault(
        "stream_queue.cpp",
        "a counter is written before the copies that it tells of",
        "        flush_copies();\n        note(step);",
        "        note(step);",
        STREAMS,
    ),
    Fault(
        "stream_queue.cpp",
        "what runs beside does not wait for the steps before it",
        "  if (!branch->forked) device_->must(library.wait_event, at_, fork_.get(), 0);\n",
        "",
        check("what_runs_beside_comes_after_the_steps_before_it"),
    ),
    Fault(
        "stream_queue.cpp",
        "a program's end does not wait for what runs beside",
        "  join(branches_.back());\n",
        "",
        check("only_the_end_waits_for_what_runs_beside"),
    ),
    Fault(
        "stream_queue.cpp",
        "a program on another stream does not wait for the one before",
        "  device_->must(device_->library->wait_event, stream, before.get(), 0);\n",
        "",
        check("programs_keep_their_order_over_all_streams"),
    ),
    Fault(
        "stream_queue.cpp",
        "a batch is longer than a driver takes",
        "constexpr size_t kMostOperations = 255;",
        "constexpr size_t kMostOperations = 256;",
        check("long_batches_are_split"),
    ),
    Fault(
        "stream_queue.cpp",
        "a program that failed half-way leaves its steps to the next",
        "    forget_noted();\n    throw;",
        "    throw;",
        check("a_program_that_fails_half_way_leaves_nothing_to_the_next"),
    ),
]
