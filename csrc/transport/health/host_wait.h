// How a host waits for its peers: for their words on the control page, and for their copies where
// programs run on the calling thread.
#pragma once

#include <chrono>

#include "transport/health/group_health.h"

namespace pg_sdma {

class HostWait {
 public:
  // `spin`: before a wait sleeps.
  HostWait(const Membership& self, ControlPage& page, GroupHealth& health,
           std::chrono::microseconds spin)
      : self_(self), page_(page), health_(health), spin_(spin) {}

  // Sleeps until `rank` rings after `heard`, or until `deadline`; throws when the group is broken,
  // and as GroupHealth::check_peers().
  void await(int rank, uint32_t heard, Clock::time_point deadline, const Operation& operation,
             bool under_way);
  bool spins() const { return spin_.count() > 0; }
  // Two ranks on one core would take turns there for milliseconds, until the kernel moves one of
  // them.
  void leave_core_to(int rank);

 private:
  const Membership self_;
  ControlPage& page_;
  GroupHealth& health_;
  const std::chrono::microseconds spin_;
};

// How an engine that runs `operation` on the calling thread waits for a peer's counter.
class CounterWait final : public Waiter {
 public:
  CounterWait(const Membership& self, ControlPage& page, GroupHealth& health, HostWait& host,
              const Operation& operation)
      : self_(self), page_(page), health_(health), host_(host), operation_(operation) {}

  void wait(Counter& counter, uint64_t value) override;
  void wrote() override { page_.ring_bell(self_.rank); }

 private:
  bool comes_at_once(const Counter& counter, uint64_t value) const;
  void wait_long(const Counter& counter, uint64_t value);
  // The one of `rank` and those that it may be waiting for itself that is furthest behind.
  int furthest_behind(int rank) const;

  const Membership& self_;
  ControlPage& page_;
  GroupHealth& health_;
  HostWait& host_;
  const Operation& operation_;
};

}  // namespace pg_sdma
