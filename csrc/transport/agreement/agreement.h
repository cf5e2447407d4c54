// Agrees with all ranks on how the next operation goes, and waits for them as long as that is
// worth it. Drives protocol.h, and late_protocol.h where a rank was late, over the control page.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "transport/agreement/preference.h"
#include "transport/agreement/wait_policy.h"
#include "transport/health/host_wait.h"
#include "transport/memory/peer_memory.h"
#include "transport/operation.h"
#include "transport/schedule/staged.h"

namespace pg_sdma {

class Agreement {
 public:
  // What it asks and moves on; all of it outlives this.
  struct Services {
    Engine& engine;
    ControlPage& page;
    PeerMemory& memory;
    GroupHealth& health;
    HostWait& host;
    Queue& queue;
    const StagingBuffers& staging;
  };

  // `ring`: entries of the page for records. `keep_staging`: for tests, whatever is faster.
  Agreement(const Membership& self, uint64_t ring, bool keep_staging, Services services)
      : self_(self), ring_(ring), keep_staging_(keep_staging), services_(services) {}

  // Takes the group's next number for the call and agrees on its route with all ranks. Throws
  // BadCall on every rank when any rank's arguments are bad; throws GroupFault.
  Operation agree(const Call& call);

  uint64_t number() const { return number_; }  // the last that was taken; from any thread

  // From now on all-gathers are carried by something else, which needs no peer's memory: on every
  // rank, or on none.
  void expose_no_gathers() { gathers_exposed_ = false; }
  // Whether all-gathers write into peers' memory, but for those of lists.
  bool pushes() const { return services_.engine.pushes() && gathers_exposed_; }

  // How long hosts wait for peers that are late; until it is set, to the call's timeout.
  void set_wait_policy(const WaitPolicy& policy) { wait_policy_ = policy; }
  const WaitPolicy& wait_policy() const { return wait_policy_; }

  // What an all-gather of the calling thread took.
  void note_time(const Call& call, const Operation& operation, std::chrono::duration<double> took);

 private:
  // One operation while it is agreed on: what peers say of it, and what becomes of that.
  struct Draft {
    const Call& call;
    Operation operation;
    CallRecord& own;
    std::vector<CallRecord>& records;  // of peers
    std::string why_not;               // a peer's memory cannot be opened
    std::string mismatch;              // the records, where they contradict each other
  };
  class RecordsOnPage;
  class ArrivalsOnPage;
  using Deadline = Clock::time_point;

  Operation begin(const Call& call);
  void describe_own(const Call& call, const Operation& operation);
  void share(const Call& call, const Operation& operation, CallRecord& record);
  Decision not_direct(const Draft& draft, Outcome outcome) const;
  bool exposes(const Operation& operation) const;
  // Whether operations are carried in order of arrival where ranks are late for them: all ranks
  // find the same.
  bool defers(const Operation& operation) const;
  bool has_room_to_defer(const Operation& operation);
  // Whether it is carried so. `lapped`: as LateProtocol::start().
  bool arrive(Draft& draft, bool lapped);
  // Opens what `peer` exposes. Throws CannotShare, once it has failed for as long as `retry`.
  void open(Draft& draft, int peer, std::chrono::milliseconds retry);
  bool open_all(Draft& draft);  // else draft.why_not says why
  void open_all_now(Draft& draft);
  void open_earlier(Draft& draft);
  uint64_t operations_behind() const;  // of the slowest peer, when this rank makes a call

  // Of engines that copy on the calling thread: whether an all-gather may go either way, whether
  // this rank wants to read its peers' memory, once for each call, and what all ranks find.
  bool may_choose(const Call& call) const;
  bool asks_for_pull(const Call& call);
  bool always_staged(const Call& call) const;  // whatever the peers ask for
  bool staged(const Draft& draft) const;

  const Membership self_;
  const uint64_t ring_;
  const bool keep_staging_;
  const Services services_;
  // A draft's, kept because they are long.
  CallRecord own_;
  std::vector<CallRecord> records_{static_cast<size_t>(self_.world)};
  bool gathers_exposed_ = true;
  WaitPolicy wait_policy_;
  Preference preference_;
  std::atomic<uint64_t> number_ = 0;  // written by one thread at a time
};

}  // namespace pg_sdma
