// A lane is one device type's half of a group: its inner backend, its transport, and the chain that
// keeps the collectives of both in issue order.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "backend/fork_guard.h"
#include "backend/group.h"
#include "backend/log/call_log.h"
#include "backend/log/call_sizes.h"
#include "backend/order/chain.h"
#include "backend/setup/group_setup.h"

namespace pg_sdma {

class Lane final : private Carrier, private Recorded {
 public:
  Lane(std::shared_ptr<const Group> group, c10::DeviceType device,
       c10::intrusive_ptr<c10d::Backend> inner);
  ~Lane() override;

  c10d::Backend& inner() { return *inner_; }

  // Issues one collective on the inner, in chain order. Returns what the inner returns (null for
  // NCCL's synchronous operations). `operation` lives for ever.
  template <class Method, class... Args>
  WorkPtr issue(const char* operation, Method method, Args&... args) {
    check_fork();
    std::lock_guard<std::timed_mutex> lock(mutex_);
    uint64_t record = 0;
    if (log_.records()) {
      FlightRecorder::Made made{operation};
      CallSizes::fill(made, args...);
      record = log_.add(made);
    }
    auto call = [this, operation, record, method](Args&... args) {
      note_elsewhere(operation);
      log_.not_ours(record);
      WorkPtr work = std::invoke(method, *inner_, args...);
      log_.issued(record);
      return work;
    };
    if (chain_->busy()) {
      return chain_->enqueue([call, args...]() mutable { return call(args...); });
    }
    chain_->before_inner();
    WorkPtr work = call(args...);
    chain_->after_inner(work);
    return work;
  }

  // Carries a call by the route that the group agrees on. Null when it was synchronous and ran
  // here, or when the inner returned null.
  WorkPtr run(std::shared_ptr<Collective> collective);

  std::vector<Stats::Row> stats() const { return log_.stats(); }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

  // After a fork, every entry raises in the child and every teardown does nothing.
  bool forked() const { return fork_guard_.forked(); }
  void check_fork() const;

  // Ends this rank's part in the transport, once what is pending is done, has failed or has timed
  // out; the inner is left to the caller. Later calls of run() raise.
  void shutdown();
  // The same at the end of the process, whose last calls may still go to the inner.
  void detach();
  // Fails what is pending and every later call of run(), here and on the peers. From any thread.
  void abort();

  LaneRecord record() const override;

  // What carries this lane's direct calls ("push", "pull", "slots", "mori"); "inner: " and the
  // reason where nothing does; "no vote yet" before the first call that asks.
  std::string way() const;

 private:
  std::vector<WorkPtr> carry(Collective& collective) override;
  std::vector<WorkPtr> carry_parts(Collective& collective);
  void run_direct(Collective& collective, const Call& part, const Operation& operation);
  WorkPtr take_inner(Collective& collective, const std::string& reason);
  void raise_if_strict(const Collective& collective, const std::string& reason) const;
  void note_elsewhere(const char* operation);
  // Has an engine, and a vote where the group has none yet.
  void prepare(Collective& collective);
  void vote();

  void leave(bool process_ends);
  // Until `ended`, asked with how long it may wait, says so; what a broken group has pending is
  // given up.
  void await_end(const std::function<bool(std::chrono::milliseconds)>& ended);
  bool broken() const;
  void end(const std::string& why);
  std::string fault() const;

  const std::shared_ptr<const Group> group_;
  const c10::DeviceType device_;
  c10::intrusive_ptr<c10d::Backend> inner_;
  const std::string inner_name_;  // for threads that must not wait for Python
  std::atomic<std::chrono::milliseconds> timeout_;
  ForkGuard fork_guard_;
  CallLog log_;

  // Guards what abort() needs while a call that waits for its peers holds mutex_.
  mutable std::mutex fault_mutex_;
  std::string fault_;  // why the group is of no use any more
  std::string way_ = "no vote yet";
  std::shared_ptr<DirectTransport> transport_;  // written under both mutexes

  // The chain's: one collective is issued at a time. What follows is read and written under it, or
  // by the chain's worker while it is busy.
  std::timed_mutex mutex_;
  GroupSetup setup_;
  bool closed_ = false;

  std::mutex leaving_;
  std::unique_ptr<Chain> chain_;  // last: its worker uses all of the above
};

}  // namespace pg_sdma
