#include "transport/agreement/agreement.h"

#include <algorithm>
#include <utility>

#include "engine/inject.h"
#include "transport/agreement/late_protocol.h"
#include "transport/health/cores.h"
#include "transport/health/messages.h"

namespace pg_sdma {

// The page as the protocol sees it: copies records where they are needed and rings who may sleep.
class Agreement::RecordsOnPage {
 public:
  RecordsOnPage(ControlPage& page, Draft& draft) : page_(page), draft_(draft) {}

  uint64_t verdict(uint64_t slot) { return page_.verdict(slot); }
  bool swap_verdict(uint64_t slot, uint64_t expected, uint64_t desired) {
    const bool first = page_.swap_verdict(slot, expected, desired);
    // Who waits for the last record or acknowledgement hears that rank's bell, and finds out
    // "direct" by itself.
    if (first && Verdict::unpack(desired).outcome != Outcome::kDirect) page_.ring_all();
    return first;
  }
  uint64_t record_number(int rank, uint64_t slot) { return page_.record_number(rank, slot); }
  CallSummary copy_record(int rank, uint64_t slot) {
    page_.copy_record(rank, slot, draft_.records[rank]);
    return draft_.records[rank].summary;
  }
  void hide_record(int rank, uint64_t slot) { page_.hide_record(rank, slot); }
  void write_record(int rank, uint64_t slot) { page_.write_record(rank, slot, draft_.own); }
  void show_record(int rank, uint64_t slot, uint64_t number) {
    page_.show_record(rank, slot, number);
    page_.ring_bell(rank);
  }
  uint64_t acknowledged(int rank) { return page_.acknowledged(rank); }
  void acknowledge(int rank, uint64_t number) {
    page_.acknowledge(rank, number);
    page_.ring_bell(rank);
  }
  uint64_t consumed(int rank) { return page_.consumed(rank); }
  void consume(int rank, uint64_t number) {
    page_.consume(rank, number);
    page_.ring_bell(rank);
  }

 private:
  ControlPage& page_;
  Draft& draft_;
};

Operation Agreement::agree(const Call& call) {
  inject::at("agree");
  services_.health.check_fault();
  services_.page.tell_core(self_.rank, this_core());
  Draft draft{call, begin(call), own_, records_, "", ""};
  describe_own(call, draft.operation);
  draft.operation.bytes = draft.own.total_bytes;
  AgreementProtocol<RecordsOnPage> protocol(self_.rank, self_.world, ring_,
                                            services_.engine.opens_exports() && gathers_exposed_);
  protocol.start(++number_, draft.own.summary);

  RecordsOnPage page(services_.page, draft);
  using Progress = AgreementProtocol<RecordsOnPage>::Progress;
  Operation& operation = draft.operation;
  operation.started = Clock::now();
  const Deadline timeout = operation.deadline();
  const uint64_t shard = call.total_bytes() / static_cast<uint64_t>(self_.world);
  wait_policy_.begin(operation.started, (self_.world - 1) * shard,
                     wait_policy_.asks_who_is_behind() ? operations_behind() : 0);
  std::shared_ptr<Queue::Marker> before;  // what the device has to do first
  const auto busy = [&] {
    if (!before) before = services_.queue.mark_caller();
    return !before->passed();
  };
  // When this rank stops waiting, or looks whether to.
  const auto until = [&](Deadline now) {
    if (!wait_policy_.ends() || !protocol.may_give_up()) return timeout;
    return std::min(
        timeout, protocol.waits_for_record() ? wait_policy_.until(now, busy) : wait_policy_.end());
  };
  for (;;) {
    const uint32_t heard = services_.page.bell(protocol.waiting_for());
    const Progress progress = protocol.step(page);
    if (progress == Progress::kDone) break;
    if (progress == Progress::kOpen) {
      protocol.opened(open_all(draft));
    } else if (progress == Progress::kBlocked) {
      const Deadline now = Clock::now();
      const Deadline deadline = until(now);
      if (now < deadline) {
        services_.host.await(protocol.waiting_for(), heard, deadline, operation,
                             /*under_way=*/false);
      } else if (deadline == timeout) {
        services_.health.fail(services_.health.timed_out(operation, protocol.waiting_for(),
                                                         "has not made this call"));
      } else {
        wait_policy_.waited_in_vain();
        protocol.give_up(has_room_to_defer(operation));
      }
    }
    // The records that explain an error may be reused once this rank has consumed it.
    if (protocol.verdict().outcome == Outcome::kError && draft.mismatch.empty()) {
      draft.mismatch = messages::mismatch(self_, services_.page, operation.number, ring_);
    }
  }

  const Outcome outcome = protocol.verdict().outcome;
  if (outcome == Outcome::kDirect) wait_policy_.met();
  // Whatever the call: ranks that have deferred theirs count on this one.
  const bool maybe = outcome == Outcome::kDeferred || protocol.lapped();
  if (services_.page.late() > 0 && maybe && arrive(draft, protocol.lapped())) {
    operation.decision.direct = true;
    return std::move(operation);
  }
  if (outcome != Outcome::kDirect) {
    services_.memory.settle(operation.number, /*direct=*/false);
    operation.decision = not_direct(draft, outcome);
    return std::move(operation);
  }
  operation.decision.direct = true;
  operation.staged = staged(draft);
  const bool has_opened = services_.engine.opens_exports();
  if (!has_opened && !operation.staged && exposes(operation)) open_all_now(draft);
  return std::move(operation);
}

Operation Agreement::begin(const Call& call) {
  Operation operation;
  operation.number = number_ + 1;
  operation.name = call.operation;
  operation.reduces = call.reduces();
  operation.trial = call.trial;
  operation.timeout = call.timeout;
  operation.exchange = exchange_of(call, self_.rank, self_.world, pushes());
  return operation;
}

bool Agreement::exposes(const Operation& operation) const {
  return gathers_exposed_ || operation.reduces;
}

void Agreement::describe_own(const Call& call, const Operation& operation) {
  own_ = describe(call, operation.exchange, self_.world);
  own_.pulls = asks_for_pull(call) ? 1 : 0;
  if (own_.summary.state == CallState::kInvalid) return;
  try {
    share(call, operation, own_);
  } catch (const CannotShare& error) {
    own_.refuse(CallState::kUnshareable, error.what());
  }
}

void Agreement::share(const Call& call, const Operation& operation, CallRecord& record) {
  if (!call.unable.empty()) throw CannotShare(call.unable);
  const std::vector<Region>& exposed = operation.exchange.exposed;
  if (exposed.size() > record.places.size()) {
    throw CannotShare("more tensors of a rank than one operation carries");
  }
  if (!exposes(operation)) return;
  const bool read_there = !always_staged(call);
  for (size_t t = 0; t < exposed.size(); ++t) {
    if (exposed[t].bytes == 0) continue;
    if (read_there) services_.engine.check_readable(exposed[t].data);
    record.places[t] =
        services_.memory.publish(exposed[t].data, exposed[t].bytes, operation.number);
  }
}

Decision Agreement::not_direct(const Draft& draft, Outcome outcome) const {
  if (outcome == Outcome::kError) throw BadCall(draft.mismatch);
  // A peer has decided without seeing this rank's record.
  if (!draft.call.invalid.empty()) throw BadCall(draft.call.invalid);
  if (outcome == Outcome::kLate) return {false, "late", "late"};
  const bool here = draft.own.summary.state == CallState::kUnshareable;
  const char* otherwise = draft.call.reduces() ? "memory that cannot be shared, or no kernel"
                                               : "memory that cannot be shared";
  return {false, draft.why_not.empty() ? otherwise : draft.why_not,
          here ? std::string(draft.own.why) : draft.why_not};
}

// -- peers' memory

void Agreement::open(Draft& draft, int peer, std::chrono::milliseconds retry) {
  Operation& operation = draft.operation;
  const std::vector<Region>& exposed = operation.exchange.exposed;
  operation.regions.resize(static_cast<size_t>(self_.world) * exposed.size());
  for (size_t t = 0; t < exposed.size(); ++t) {
    const size_t bytes = exposed[t].bytes;  // the same on every rank: the records agree
    if (bytes == 0) continue;
    const Place& place = draft.records[peer].places[t];
    const Mapping found = services_.memory.open(peer, place.export_id, operation.number, retry);
    if (bytes > found.bytes || place.offset > found.bytes - bytes) {
      throw CannotShare("a tensor outside of its export");
    }
    operation.regions[static_cast<size_t>(peer) * exposed.size() + t] = {found.space,
                                                                         found.base + place.offset};
  }
}

bool Agreement::open_all(Draft& draft) {
  try {
    for (int peer = 0; peer < self_.world; ++peer) {
      if (peer != self_.rank) open(draft, peer, PeerMemory::kBriefly);
    }
    return true;
  } catch (const CannotShare& error) {
    draft.why_not = error.what();
    return false;
  }
}

void Agreement::open_all_now(Draft& draft) {
  if (open_all(draft)) return;
  services_.health.fail(messages::title(self_, draft.operation) + ": " + draft.why_not);
}

// -- ranks that are late

// The page as the late protocol sees it: rings who may sleep.
class Agreement::ArrivalsOnPage {
 public:
  ArrivalsOnPage(ControlPage& page, int rank, Draft* draft)
      : page_(page), rank_(rank), draft_(draft) {}

  uint64_t arrived(uint64_t slot) { return page_.arrived(slot); }
  bool swap_arrived(uint64_t slot, uint64_t expected, uint64_t desired) {
    const bool first = page_.swap_arrived(slot, expected, desired);
    if (first) page_.ring_bell(rank_);
    return first;
  }
  void write_arrival(int rank, uint64_t slot) { page_.write_arrival(rank, slot, draft_->own); }
  CallSummary copy_arrival(int rank, uint64_t slot) {
    page_.copy_arrival(rank, slot, draft_->records[rank]);
    return draft_->records[rank].summary;
  }
  uint64_t caught_up(int rank) { return page_.caught_up(rank); }
  void catch_up(int rank, uint64_t number) { page_.catch_up(rank, number); }

 private:
  ControlPage& page_;
  const int rank_;
  Draft* const draft_;  // none where only its room is asked for
};

bool Agreement::defers(const Operation& operation) const {
  return services_.page.late() > 0 && !operation.trial && operation.exchange.any_order();
}

bool Agreement::has_room_to_defer(const Operation& operation) {
  if (!defers(operation)) return false;
  ArrivalsOnPage page(services_.page, self_.rank, nullptr);
  LateProtocol<ArrivalsOnPage> protocol(self_.rank, self_.world, services_.page.late());
  return protocol.has_room(page, operation.number);
}

bool Agreement::arrive(Draft& draft, bool lapped) {
  Operation& operation = draft.operation;
  LateProtocol<ArrivalsOnPage> protocol(self_.rank, self_.world, services_.page.late());
  using Progress = LateProtocol<ArrivalsOnPage>::Progress;
  using Turn = LateProtocol<ArrivalsOnPage>::Turn;
  // A call of another kind does not join either.
  const CallSummary own =
      defers(operation) ? draft.own.summary : CallSummary{CallState::kInvalid, 0};
  protocol.start(operation.number, own, lapped);
  ArrivalsOnPage page(services_.page, self_.rank, &draft);
  while (!protocol.done()) {
    const uint32_t heard = services_.page.bell(protocol.waiting_for());
    if (protocol.step(page) != Progress::kBlocked) continue;
    const int missing = protocol.waiting_for();
    if (Clock::now() >= operation.deadline()) {
      const bool made = services_.page.consumed(missing) >= operation.number;
      services_.health.fail(services_.health.timed_out(
          operation, missing,
          made ? "has not joined this call, as this rank: of ranks whose memory cannot be shared "
                 "one can come late"
               : "has not made this call"));
    }
    // Who ends from here on, having heard the verdict, is missed at once.
    services_.host.await(missing, heard, operation.deadline(), operation, /*under_way=*/true);
  }
  if (protocol.turn() == Turn::kInner) return false;
  if (protocol.turn() == Turn::kBroken) {
    services_.health.fail(messages::late_mismatch(self_, operation.number, draft.own,
                                                  protocol.culprit(), draft.records));
  }
  services_.memory.keep_tickets(operation.number);
  operation.earlier.emplace();
  for (int i = 1; i < self_.world; ++i) {
    const int peer = (self_.rank + i) % self_.world;
    if (protocol.has_earlier(peer)) operation.earlier->push_back(peer);
  }
  open_earlier(draft);
  return true;
}

// They count on this rank, whatever it takes.
void Agreement::open_earlier(Draft& draft) {
  for (const int peer : *draft.operation.earlier) {
    try {
      open(draft, peer, PeerMemory::kStubbornly);
    } catch (const CannotShare& error) {
      services_.health.check_peers(draft.operation, /*under_way=*/true);  // it may have ended since
      services_.health.fail(messages::title(self_, draft.operation) + ": the output of rank " +
                            std::to_string(peer) + " cannot be reached: " + error.what());
    }
  }
}

uint64_t Agreement::operations_behind() const {
  uint64_t behind = 0;
  for (int rank = 0; rank < self_.world; ++rank) {
    const uint64_t consumed = services_.page.consumed(rank);
    if (consumed + 1 < number_) behind = std::max(behind, number_ - 1 - consumed);
  }
  return behind;
}

// -- staging buffers, or peers' memory

bool Agreement::may_choose(const Call& call) const {
  return services_.staging.any() && !call.pieces.empty() &&
         !services_.staging.hold(call.shard_bytes()) && !call.overlapped && !keep_staging_;
}

bool Agreement::asks_for_pull(const Call& call) {
  if (may_choose(call)) return preference_.prefers_pull(call.shard_bytes());
  return services_.staging.any() && call.overlapped && !services_.staging.hold(call.shard_bytes());
}

bool Agreement::always_staged(const Call& call) const {
  return !call.reduces() && services_.staging.any() && services_.staging.hold(call.shard_bytes());
}

bool Agreement::staged(const Draft& draft) const {
  if (draft.call.reduces() || !services_.staging.any()) return false;
  if (always_staged(draft.call)) return true;
  return std::none_of(draft.records.begin(), draft.records.end(),
                      [](const CallRecord& record) { return record.pulls != 0; });
}

void Agreement::note_time(const Call& call, const Operation& operation,
                          std::chrono::duration<double> took) {
  if (may_choose(call)) preference_.note(call.shard_bytes(), !operation.staged, took);
}

}  // namespace pg_sdma
