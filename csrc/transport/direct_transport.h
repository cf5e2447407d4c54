// All-gathers and reduce-scatters between the ranks' tensors where they lie: every rank pulls what
// it needs of its peers', or pushes its shard into their outputs where its engine does that faster.
// Or it all-gathers through the page's slots where it has some, or by a courier.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/control_page.h"
#include "transport/courier.h"
#include "transport/peers.h"
#include "transport/preference.h"
#include "transport/progress.h"
#include "transport/sharing.h"
#include "transport/slots.h"
#include "transport/transport.h"
#include "transport/wait_policy.h"
#include "transport/watchdog.h"
#include "transport/waves.h"

namespace pg_sdma {

class DirectTransport final : public Transport {
 public:
  struct Options {
    std::string group;  // for messages
    int rank = 0;
    int world = 1;
    uint64_t ring = 16;
    std::chrono::microseconds spin{0};  // before a wait sleeps
    bool keep_slots = false;            // for tests: whatever is faster
    // Told why the group is broken, from the thread that finds out, maybe several times, and before
    // anything else comes of it.
    std::function<void(const std::string&)> on_fault;
  };

  // `identities`: Engine::identity() of each rank.
  DirectTransport(Options options, std::shared_ptr<Engine> engine, ControlPage page,
                  std::vector<std::string> identities, std::unique_ptr<Peers> peers);
  ~DirectTransport() override;

  Decision agree(const Call& call) override;
  void carry(const Call& call) override;
  void reduce(const Call& call, Reducer& reducer) override;
  void reduce(const Call& call, StreamReducer& reducer) override;
  Queue& queue() override { return *queue_; }
  void abort(const std::string& why) override;

  // From now on all-gathers go by `courier`: on every rank, or on none.
  void use(std::unique_ptr<Courier> courier) { courier_ = std::move(courier); }
  bool has_courier() const { return courier_ != nullptr; }
  // Whether all-gathers push, but for those of lists.
  bool pushes() const { return engine_->pushes() && !courier_; }
  // What carries all-gathers, in a word.
  std::string way() const;

  ControlPage& page() { return page_; }
  // From any thread.
  std::vector<RankProgress> progress() const {
    return read_progress(page_, *peers_, options_.world);
  }
  uint64_t number() const { return number_; }  // the last that was taken
  // Whether the last operation is direct although ranks were late for it.
  bool deferred() const { return earlier_.has_value(); }
  // Before this rank leaves: returns once all that is enqueued here is done, on every rank, or the
  // group is broken. The watchdog bounds it, by the operations' own deadlines.
  void drain();
  // The inner carries a collective of this group.
  void note_elsewhere(const char* operation) { page_.note_elsewhere(options_.rank, operation); }
  // Throws GroupFault when a peer that the last operation needs is gone, or the group is broken.
  void check();
  // Whether the watchdog looks after operations from here on, and one that fails here breaks the
  // group. Else carry() throws std::runtime_error where no host waits in it, and the caller tells
  // the peers.
  void set_watched(bool watched) { watched_ = watched; }
  // The last operation, which was called direct, cannot begin here: this breaks the group. Throws
  // GroupFault.
  [[noreturn]] void cannot_begin(const std::string& why) { fail_carrying(why); }
  // The last operation never ends here, or never began: peers do not wait for it, and what it may
  // still be copying, if it `copies`, stays open.
  void abandon(bool copies);
  // How long hosts wait for peers that are late; until it is set, to the call's timeout.
  void set_wait_policy(const WaitPolicy& policy) { wait_policy_ = policy; }
  const WaitPolicy& wait_policy() const { return wait_policy_; }
  // What copies to the next rank take, alone and with one from there beside: after an all-gather of
  // `call` that has ended on all ranks, whose memory is still there, and while nobody else copies.
  void measure_copies(const Call& call);
  const CopySpeed& copy_speed() const { return copy_speed_; }

 private:
  class PageView;
  class ArrivalView;
  class HostWaiter;
  using Deadline = Clock::time_point;

  // Whether an all-gather may go either way.
  bool may_choose(const Call& call) const;
  // Whether this rank wants it to be a pull. Once for each call.
  bool asks_for_pull(const Call& call);
  bool always_through_slots(const Call& call) const;  // whatever the peers ask for
  // Whether an all-gather goes through the slots: all ranks find the same.
  bool through_slots(const Call& call) const;
  // Whether an all-gather writes into the peers' outputs: all ranks find the same.
  bool pushes(const Call& call) const;
  // What peers read or write of this rank's memory.
  std::vector<Region> reached(const Call& call) const;
  // Whether an all-gather for which ranks are late is carried in order of arrival, with no host
  // waiting, instead of by the inner: all ranks find the same.
  bool defers(const Call& call) const;
  bool has_room_to_defer(const Call& call);
  bool arrive(const Call& call, bool lapped);  // whether it is carried so; sets earlier_
  void write_late_program(const Call& call);
  void tell_and_wait(Waiter& waiting);
  void write_program(const Call& call);               // of an all-gather, into program_
  void hand_over(const Call& call, Waiter& waiting);  // to the courier
  // Add to program_.
  void copy_own(const Call& call, const Wave& wave, uint32_t track);
  void copy_from(int peer, const Call& call, const Wave& wave, uint32_t track);
  void copy_to(int peer, const Call& call, const Wave& wave, uint32_t track);
  void add_done();             // this rank is done
  void add_wait_until_done();  // and waits until all others are

  // Bytes [offset, offset + bytes) of every rank's slice of one share, and where in a landing.
  struct Landing {
    size_t share = 0;
    size_t offset = 0;
    size_t bytes = 0;
    size_t at = 0;
  };
  static std::vector<std::vector<Landing>> landings(const Call& call, size_t room);
  void write_program(const Call& call, StreamReducer& reducer);
  void land_from(int peer, const Call& call, const std::vector<Landing>& parts, void* to);
  // Runs `body`, part of a direct operation: whatever it throws breaks the group.
  void guarded(const std::function<void()>& body);
  std::unique_ptr<Waiter> waiter(const Call& call);

  CallRecord describe(const Call& call);
  bool open_exports(const Call& call, std::string& why_not);
  // Throws CannotShare, once it has failed for as long as `retry`.
  void open_exports_of(int peer, const std::vector<Region>& regions,
                       std::chrono::milliseconds retry);
  uint64_t operations_behind() const;  // of the slowest peer, when this rank makes a call
  // Sleeps until `rank` rings after `heard`, or until `deadline`; throws when the group is broken.
  void await(int rank, uint32_t heard, Deadline deadline);
  void leave_core_to(int rank);
  void check_fault() const;
  void check_peers();
  [[noreturn]] void fail(const std::string& text);
  [[noreturn]] void fail_carrying(const std::string& why);
  std::string explain_error() const;
  // Why the own call breaks the group, whose other ranks count on it; `culprit` as in Arrival.
  std::string explain_late_error(int culprit) const;
  // The one of `rank` and those that it may be waiting for itself that is furthest behind.
  int furthest_behind(int rank) const;
  std::string who_is_missing(const Call& call, int rank, const char* what) const;
  std::string this_operation() const;  // as messages name it

  Options options_;
  std::shared_ptr<Engine> engine_;
  ControlPage page_;
  std::unique_ptr<Peers> peers_;
  Slots slots_;
  Preference preference_;
  WaitPolicy wait_policy_;
  CopySpeed copy_speed_;
  Sharing sharing_;
  std::unique_ptr<Courier> courier_;  // before the queue, behind which its last gather is
  std::unique_ptr<Queue> queue_;      // after sharing_: copies end before what they reach is closed

  std::unique_ptr<Watchdog> watchdog_;  // where no host waits for an operation to end

  std::atomic<uint64_t> number_ = 0;  // written by one thread at a time
  Deadline started_{};                // of operation number_
  bool watched_ = true;
  bool carrying_ = false;  // operation number_ is direct, and under way
  // Of operation number_, where it is carried in order of arrival: the ranks before this one.
  std::optional<std::vector<int>> earlier_;
  CallRecord own_;
  std::vector<CallRecord> records_;  // of the operation being agreed on, one a rank
  Program program_;
  std::deque<Launch> launches_;  // of program_
};

}  // namespace pg_sdma
