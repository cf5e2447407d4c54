// All-gathers and reduce-scatters between the ranks' tensors where they lie: every rank pulls what
// it needs of its peers', or pushes its shard into their outputs where its engine does that faster.
// Or it all-gathers through staging buffers where the page has some, or by somebody else's means.
//
// This is the front of the folder: it agrees (agreement/), writes a program (schedule/) and hands
// it to the engine's queue.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transport/agreement/agreement.h"
#include "transport/external_all_gather.h"
#include "transport/health/group_health.h"
#include "transport/health/host_wait.h"
#include "transport/health/watchdog.h"
#include "transport/memory/peer_memory.h"
#include "transport/operation.h"
#include "transport/schedule/staged.h"

namespace pg_sdma {

// Calls are made one at a time, in the group's issue order.
class DirectTransport {
 public:
  struct Options {
    std::string group;  // for messages
    int rank = 0;
    int world = 1;
    uint64_t ring = 16;
    std::chrono::microseconds spin{0};  // before a wait sleeps
    bool keep_slots = false;            // for tests: whatever is faster
    // As GroupHealth's.
    std::function<void(const std::string&)> on_fault;
  };

  // `identities`: Engine::identity() of each rank.
  DirectTransport(const Options& options, std::shared_ptr<Engine> engine, ControlPage page,
                  std::vector<std::string> identities, std::unique_ptr<Peers> peers);
  DirectTransport(const DirectTransport&) = delete;
  DirectTransport& operator=(const DirectTransport&) = delete;
  ~DirectTransport();

  // As Agreement::agree().
  Operation agree(const Call& call) { return agreement_.agree(call); }
  // Carries out the all-gather whose `operation` agree() has just returned, direct: on the calling
  // thread, or enqueued on queue() where the engine is stream-ordered. Throws GroupFault; of a
  // trial std::runtime_error, where no host waits in it.
  void run(const Call& call, const Operation& operation) { run(call, operation, nullptr); }
  // The same of a reduce-scatter.
  void run(const Call& call, const Operation& operation, Reducer& reducer) {
    run(call, operation, &reducer);
  }
  Queue& queue() { return *queue_; }
  // Makes every wait of this process, present and future, throw GroupFault. From any thread.
  void abort(const std::string& why) { health_.declare(why); }

  // From now on all-gathers go by `external`: on every rank, or on none.
  void use(std::unique_ptr<ExternalAllGather> external);
  bool has_external() const { return external_ != nullptr; }
  // Whether all-gathers push, but for those of lists.
  bool pushes() const { return agreement_.pushes(); }
  // What carries all-gathers, in a word.
  std::string way() const;

  ControlPage& page() { return page_; }
  const Membership& membership() const { return self_; }
  // From any thread.
  std::vector<RankProgress> progress() const { return health_.progress(); }
  uint64_t number() const { return agreement_.number(); }  // the last that was taken
  // The inner carries a collective of this group.
  void note_elsewhere(const char* operation) { page_.note_elsewhere(self_.rank, operation); }
  void set_wait_policy(const WaitPolicy& policy) { agreement_.set_wait_policy(policy); }
  const WaitPolicy& wait_policy() const { return agreement_.wait_policy(); }

  // Throws GroupFault when a peer that `operation`, which is direct, needs is gone, or the group is
  // broken.
  void check(const Operation& operation);
  // `operation`, which was called direct, cannot begin here: this breaks the group. Throws
  // GroupFault.
  [[noreturn]] void cannot_begin(const Operation& operation, const std::string& why) {
    fail(operation, why);
  }
  // The last operation never ends here, or never began: peers do not wait for it, and what it may
  // still be copying, if it `copies`, stays open.
  void abandon(bool copies);
  // Before this rank leaves: returns once all that is enqueued here is done, on every rank, or the
  // group is broken. The watchdog bounds it, by the operations' own deadlines.
  void drain();

 private:
  void run(const Call& call, const Operation& operation, Reducer* reducer);
  void run_external(const Call& call, ProgramWriter& write, Waiter& waiting);
  // Runs `body`, part of a direct operation: whatever it throws breaks the group.
  void guarded(const Operation& operation, const std::function<void()>& body);
  [[noreturn]] void fail(const Operation& operation, const std::string& why);

  const Membership self_;
  const std::shared_ptr<Engine> engine_;
  ControlPage page_;
  GroupHealth health_;
  HostWait host_;
  StagingBuffers staging_;
  PeerMemory memory_;
  std::unique_ptr<ExternalAllGather> external_;  // before the queue, behind which its last one is
  std::unique_ptr<Queue> queue_;  // after memory_: copies end before what they reach is closed
  Agreement agreement_;
  std::unique_ptr<Watchdog> watchdog_;  // where no host waits for an operation to end
};

}  // namespace pg_sdma
