// The all-gather of DirectTransport for which a rank was late: carried in order of arrival, so that
// no host waits for another (arrival.h).
//
// Who comes first enqueues a wait for the others, and has nothing to copy. Who comes later pushes
// its shard to each rank before it, as always, and pulls that rank's shard, which lies in its place
// in that rank's output: so what a rank exports is still the output alone.
#include <algorithm>
#include <utility>

#include "transport/arrival.h"
#include "transport/direct_transport.h"

namespace pg_sdma {

// The page as Arrival sees it: rings who may sleep.
class DirectTransport::ArrivalView {
 public:
  explicit ArrivalView(DirectTransport& self) : self_(self), page_(self.page_) {}

  uint64_t arrived(uint64_t slot) { return page_.arrived(slot); }
  bool swap_arrived(uint64_t slot, uint64_t expected, uint64_t desired) {
    const bool first = page_.swap_arrived(slot, expected, desired);
    if (first) page_.ring_bell(self_.options_.rank);
    return first;
  }
  void write_arrival(int rank, uint64_t slot) { page_.write_arrival(rank, slot, self_.own_); }
  CallSummary copy_arrival(int rank, uint64_t slot) {
    page_.copy_arrival(rank, slot, self_.records_[rank]);
    return self_.records_[rank].summary;
  }
  uint64_t caught_up(int rank) { return page_.caught_up(rank); }
  void catch_up(int rank, uint64_t number) { page_.catch_up(rank, number); }

 private:
  DirectTransport& self_;
  ControlPage& page_;
};

bool DirectTransport::defers(const Call& call) const {
  return page_.late() > 0 && watched_ && pushes(call);
}

bool DirectTransport::has_room_to_defer(const Call& call) {
  if (!defers(call)) return false;
  ArrivalView view(*this);
  return Arrival<ArrivalView>(options_.rank, options_.world, page_.late()).has_room(view, number_);
}

bool DirectTransport::arrive(const Call& call, bool lapped) {
  Arrival<ArrivalView> arrival(options_.rank, options_.world, page_.late());
  using Progress = Arrival<ArrivalView>::Progress;
  using Turn = Arrival<ArrivalView>::Turn;
  // A call of another kind does not join either.
  const CallSummary own = defers(call) ? own_.summary : CallSummary{CallState::kInvalid, 0};
  arrival.start(number_, own, lapped);
  ArrivalView view(*this);
  const Deadline timeout = started_ + call.timeout;
  carrying_ = true;  // who ends from here on, having heard the verdict, is missed at once
  while (!arrival.done()) {
    const uint32_t heard = page_.bell(arrival.waiting_for());
    if (arrival.step(view) != Progress::kBlocked) continue;
    if (Clock::now() >= timeout) {
      const int missing = arrival.waiting_for();
      const bool made = page_.consumed(missing) >= number_;
      fail(who_is_missing(call, missing,
                          made ? "has not joined this call, as this rank: of ranks whose memory "
                                 "cannot be shared one can come late"
                               : "has not made this call"));
    }
    await(arrival.waiting_for(), heard, timeout);
  }
  carrying_ = arrival.turn() != Turn::kInner;
  if (!carrying_) return false;
  if (arrival.turn() == Turn::kBroken) fail(explain_late_error(arrival.culprit()));
  sharing_.keep_tickets(number_);
  earlier_.emplace();
  for (int i = 1; i < options_.world; ++i) {
    const int peer = (options_.rank + i) % options_.world;
    if (arrival.has_earlier(peer)) earlier_->push_back(peer);
  }
  return true;
}

// The own shard first, because peers read it where it comes to lie.
void DirectTransport::write_late_program(const Call& call) {
  const std::vector<Region> regions = reached(call);
  const Wave all = std::move(cut(call, SIZE_MAX).front());
  program_.clear();
  copy_own(call, all, 0);
  program_.push_back(Step::write(page_.ready(options_.rank), number_));
  // One call of the driver for both: what follows on either track is behind it.
  if (!earlier_->empty()) program_.push_back(Step::wait(page_.ready(earlier_->front()), number_));
  const auto await_ready = [&](int peer, uint32_t track) {
    if (peer == earlier_->front()) return;
    program_.push_back(Step::wait(page_.ready(peer), number_).on(track));
  };
  for (const int peer : *earlier_) {
    try {
      open_exports_of(peer, regions, Sharing::kStubbornly);
    } catch (const CannotShare& error) {
      check_peers();  // it may have ended since
      throw CannotShare("the output of rank " + std::to_string(peer) +
                        " cannot be reached: " + error.what());
    }
    await_ready(peer, Step::kBeside);
    copy_from(peer, call, all, Step::kBeside);
  }
  uint32_t track = 0;
  for (const int peer : *earlier_) {
    await_ready(peer, ++track);
    copy_to(peer, call, all, track);
  }
}

// A program of its own: the pulls run beside the pushes, and `done` speaks of both.
void DirectTransport::tell_and_wait(Waiter& waiting) {
  program_.clear();
  add_done();
  add_wait_until_done();
  queue_->run(program_, waiting);
}

}  // namespace pg_sdma
