// Whether a group is whole: the fault that any rank may declare, and peers that are gone.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transport/errors.h"
#include "transport/health/peers.h"
#include "transport/health/progress.h"
#include "transport/membership.h"
#include "transport/memory/control_page.h"
#include "transport/operation.h"

namespace pg_sdma {

class GroupHealth {
 public:
  // `copies_alone`: whether a rank's copies go on without its host. `on_fault`: told why the group
  // is broken, from the thread that finds out, maybe several times, and before anything else comes
  // of it.
  GroupHealth(const Membership& self, ControlPage& page, std::unique_ptr<Peers> peers,
              bool copies_alone, std::function<void(const std::string&)> on_fault)
      : self_(self),
        page_(page),
        peers_(std::move(peers)),
        copies_alone_(copies_alone),
        on_fault_(std::move(on_fault)) {}

  const Peers& peers() const { return *peers_; }
  bool broken() const { return page_.faulted(); }
  // Throws GroupFault where the group is broken.
  void check_fault() const;
  // Breaks the group, unless it is broken already. Throws GroupFault.
  [[noreturn]] void fail(const std::string& why);
  // The same without throwing.
  void declare(const std::string& why);
  void tell(const std::string& why) const {
    if (on_fault_) on_fault_(why);
  }
  // Fails when a peer that `operation` needs is gone. `under_way`: it is direct, and peers' copies
  // are needed as well as their word.
  void check_peers(const Operation& operation, bool under_way);

  // From any thread.
  std::vector<RankProgress> progress() const { return read_progress(page_, *peers_, self_.world); }
  // The message of an operation that is past its deadline because of `rank`, which has not done
  // `what`.
  std::string timed_out(const Operation& operation, int rank, const char* what) const;

 private:
  std::string tell_progress_of(const Operation& operation) const;

  const Membership self_;
  ControlPage& page_;
  const std::unique_ptr<Peers> peers_;
  const bool copies_alone_;
  const std::function<void(const std::string&)> on_fault_;
};

}  // namespace pg_sdma
