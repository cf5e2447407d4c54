// A lane is one device type's half of a group: its inner backend, its transport, and the chain that
// keeps the collectives of both in issue order.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "backend/call_sizes.h"
#include "backend/chain.h"
#include "backend/flight_record.h"
#include "backend/flight_recorder.h"
#include "backend/fork_guard.h"
#include "backend/stats.h"
#include "transport/setup/rendezvous.h"

namespace pg_sdma {

// From which size on calls go direct where a machine was tuned; none: not measured.
struct TunedBounds {
  std::optional<uint64_t> min_bytes, min_sum_bytes, min_mean_bytes;  // as in Policy
  std::string text;  // the same in words: must be equal on all ranks
};

// The settings of src/pg_sdma/settings.py, which declares and documents them, as C++ needs them.
struct Settings {
  bool enabled = true;
  bool all_gathers = true;       // go direct
  bool reduce_scatters = false;  // go direct
  uint64_t landing_bytes = uint64_t{64} << 20;
  std::string no_device_sums;         // why reduce-scatters of device tensors cannot go direct
  std::optional<uint64_t> min_bytes;  // none: what was tuned, or the engine's default
  std::map<c10::DeviceType, TunedBounds> tuned;
  std::optional<double> patience_ms;  // none: the engine's default
  bool slots = true;
  bool defer = true;  // all-gathers for which ranks are late
  std::vector<c10::DeviceType> peer_copies_on{c10::kCPU, c10::kCUDA};  // the lanes that may copy
  std::vector<c10::DeviceType> mori_on;  // the lanes that mori may serve
  std::string no_mori;                   // why mori serves none, where it was asked for
  uint64_t mori_bytes = 0;               // of its memory on each device
  bool whole_job = true;                 // the group has every rank of the job
  bool strict = false;
  bool let_peers_read = true;
  uint64_t ring = 16;
  bool allow_same_device = false;
  bool allow_pcie = false;
  bool hip = false;    // torch was built for ROCm: "cuda" means HIP
  std::string driver;  // library to open instead of the vendor's
  uint64_t trace_entries = 0;
  std::string trace_file;  // where a broken group's flight record goes; empty: nowhere
  std::string agreed;      // what must be equal on all ranks, as text
};

// What the lanes of a group share.
struct Group {
  int rank = 0;
  int size = 1;
  std::string name;
  c10::intrusive_ptr<c10d::Store> store;
  Settings settings;
  std::chrono::milliseconds timeout{0};
  std::vector<int> global_ranks;  // of all ranks
};

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
    if (recorder_.on()) {
      FlightRecorder::Made made{operation};
      CallSizes::fill(made, args...);
      record = recorder_.add(made);
    }
    auto call = [this, operation, record, method](Args&... args) {
      note_elsewhere(operation);
      recorder_.route(record, 0, not_ours_);
      WorkPtr work = std::invoke(method, *inner_, args...);
      recorder_.end(record, FlightRecorder::State::kIssued);
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

  std::vector<Stats::Row> stats() const { return stats_.rows(); }
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
  void add_to_record(Collective& collective);
  void record_fault(const std::string& why);

  void note_elsewhere(const char* operation);
  void prepare(Collective& collective);
  Rendezvous::Options vote_options();
  void make_engine(c10::Device device);
  std::shared_ptr<ExternalOffer> offer_mori() const;
  std::string announcement(const Rendezvous::Result& result, const std::string& which) const;
  void vote();
  WorkPtr take_inner(Collective& collective, const std::string& reason);
  void refuse_silence(const Collective& collective, const std::string& reason) const;
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
  Stats stats_;
  FlightRecorder recorder_;
  const std::string* const direct_;      // the empty reason
  const std::string* const deferred_;    // of direct ones for which ranks were late
  const std::string* const not_ours_;    // why other collectives are the inner's
  std::atomic<bool> live_{false};        // once the vote is over
  std::atomic<uint64_t> ready_from_{0};  // bytes from which Collective::get_ready() has a point
  std::atomic<bool> fault_recorded_{false};

  // The chain's: one collective is issued at a time. What follows is read and written under it, or
  // by the chain's worker while it is busy.
  std::timed_mutex mutex_;
  Rendezvous rendezvous_;
  bool voted_ = false;
  bool closed_ = false;
  Policy policy_;
  bool off_everywhere_ = false;  // PG_SDMA=off on every rank
  std::shared_ptr<Engine> engine_;
  bool one_at_a_time_ = false;  // Engine::shares_hardware_queues
  std::string no_engine_;       // why there is none
  std::optional<c10::Device> engine_device_;

  // Guards what abort() needs while a call that waits for its peers holds mutex_.
  mutable std::mutex fault_mutex_;
  std::string fault_;  // why the group is of no use any more
  std::string way_ = "no vote yet";
  std::shared_ptr<DirectTransport> transport_;  // written under both mutexes

  std::mutex leaving_;
  std::unique_ptr<Chain> chain_;  // last: its worker uses all of the above
};

// Who hears the one line a group logs, and what in it the user has to be warned of, if anything;
// set by the Python side.
using Log = std::function<void(const std::string& line, const std::string& warning)>;
void set_log(Log log);

// Who makes a rank's part in mori's all-gathers, for tensors on a device; set by the Python side.
using Mori = std::function<std::shared_ptr<ExternalOffer>(const Group&, c10::Device)>;
void set_mori(Mori mori);

}  // namespace pg_sdma
