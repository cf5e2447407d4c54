// How long a host waits within a call for peers that have not made it yet, before it goes on
// without them.
//
// Going on has a price. Where ranks go in order of arrival, the later of two copies both ways, and
// a GPU that has one engine for its peers' memory does the one copy after the other: the gather
// takes twice its time on the device. Elsewhere the inner carries the call. Waiting has a price
// too: a device that runs out of work, and a host that gives up its lead.
//   - While the caller's stream holds work that has yet to run, the operation could not start:
//     waiting costs the device nothing, so a host waits, up to `busy_wait`.
//   - Once the stream has run dry it waits as long as the second copy would take, and no longer.
//   - Where it has waited in vain many times in a row, and a peer is operations behind, it does not
//     wait: that peer is late by more than a wait could make up for.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

#include "transport/clock.h"

namespace pg_sdma {

// What this group's devices do when they copy, as the self-test has measured it.
struct CopySpeed {
  double bytes_per_second = 0;  // of one copy between two devices; 0: not measured
  // Whether one device reads from a peer and writes to it in the time of one of the two.
  bool both_ways_at_once = false;
};

class WaitPolicy {
 public:
  using Duration = Clock::duration;

  // The shortest wait: peers that make the call at the same time come within it.
  static constexpr std::chrono::microseconds kIdleWait{50};
  // A host that waits longer than this would be held up by a peer that needs what it does next.
  static constexpr std::chrono::milliseconds kBusyWait{5};
  // Waits in vain, one after the other, from which on a peer counts as steadily behind.
  static constexpr int kSteadily = 8;

  // Waits as long as the call's timeout: of an engine whose inner blocks the host too.
  WaitPolicy() = default;
  // Waits `wait`, whatever that costs.
  static WaitPolicy fixed(Duration wait);
  // Waits by what it costs.
  static WaitPolicy by_cost(const CopySpeed& speed, Duration busy_wait = kBusyWait);

  const CopySpeed& speed() const { return speed_; }

  // Whether a wait ends before the call's timeout.
  bool ends() const { return kind_ != Kind::kEndless; }

  // Whether begin() looks at `behind`, which reads a line of every rank's. One wait in vain is
  // enough where it is the user's, which is long: waiting the whole of it at every call would only
  // make this rank late as well.
  bool asks_who_is_behind() const {
    return in_vain_ > 0 && in_vain_ >= (kind_ == Kind::kFixed ? 1 : kSteadily);
  }
  // A call begins. `second_copy`: bytes that its last rank copies once more if all others come
  // before it. `behind`: operations that the slowest peer has yet to come to before this one.
  void begin(Clock::time_point now, uint64_t second_copy, uint64_t behind);
  // When to ask again whether to wait: not after `now` once the wait is over. `busy` tells whether
  // the caller's stream holds work from before the call.
  Clock::time_point until(Clock::time_point now, const std::function<bool()>& busy);
  // The longest that this call waits, for peers that have made it and will act soon.
  Clock::time_point end() const { return began_ + longest_; }
  // The call that began last is decided: after all of the wait, or with all peers there.
  void waited_in_vain() { ++in_vain_; }
  void met() { in_vain_ = 0; }

 private:
  enum class Kind : uint8_t { kEndless, kFixed, kByCost };

  Kind kind_ = Kind::kEndless;
  CopySpeed speed_;
  Duration longest_{0};
  int in_vain_ = 0;  // calls in a row

  // Of the call:
  Clock::time_point began_{};
  Clock::time_point dry_until_{};  // once the stream has run dry
  Duration second_copy_{0};
  bool at_once_ = false;
  bool dry_ = false;
};

}  // namespace pg_sdma
