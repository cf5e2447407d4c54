// How one lane of a group comes by its transport: the engine of its device, the vote of all ranks,
// and the policy that comes of it. All of it under the lane's mutex, but for note_elsewhere().
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "backend/collectives/route.h"
#include "backend/group.h"
#include "transport/setup/rendezvous.h"

namespace pg_sdma {

class GroupSetup {
 public:
  // Of the lane, from any thread: what has broken it, empty while nothing has; and who is told why
  // the transport is broken.
  struct Hooks {
    std::function<std::string()> fault;
    std::function<void(const std::string&)> on_fault;
  };
  struct Outcome {
    std::unique_ptr<DirectTransport> transport;  // none where the group uses the inner
    std::string way;                             // Lane::way()
  };

  // Announces this rank to its peers, without waiting. `inner`: the inner backend's name.
  GroupSetup(std::shared_ptr<const Group> group, c10::DeviceType device, std::string inner,
             Hooks hooks);

  // Makes the engine of the tensors' device, once.
  void make_engine(c10::Device device);
  // Whether the caller's stream is recording a graph.
  bool capturing() const { return engine_ && engine_->capturing(); }
  // Waits for every rank. Throws GroupFault where the vote fails, for good.
  Outcome vote(std::chrono::milliseconds timeout);
  bool voted() const { return voted_; }
  // No call goes direct any more, for `reason`.
  void close(const std::string& reason);
  // The inner carries a collective.
  void note_elsewhere(const char* operation) {
    if (!voted_) rendezvous_.note_elsewhere(operation);
  }

  // -- once voted
  const Policy& policy() const { return policy_; }
  const Engine& engine() const { return *engine_; }
  // Whether operations are enqueued one at a time in this process: transport/enqueuing.h.
  bool one_at_a_time() const { return engine_ && engine_->shares_hardware_queues(); }
  // Whether every rank asked for PG_SDMA=off.
  bool off_everywhere() const { return off_everywhere_; }
  // Bytes from which Collective::get_ready() has a point. From any thread.
  uint64_t ready_from() const { return ready_from_; }

 private:
  Rendezvous::Options vote_options();
  void settle(const Rendezvous::Result& result);
  std::shared_ptr<ExternalOffer> offer_mori() const;
  std::string announcement(const Rendezvous::Result& result, const std::string& which) const;

  const std::shared_ptr<const Group> group_;
  const c10::DeviceType device_;
  const std::string inner_;
  const Hooks hooks_;
  std::atomic<bool> live_{false};  // once the vote is over
  std::atomic<uint64_t> ready_from_{0};
  Rendezvous rendezvous_;
  bool voted_ = false;
  Policy policy_;
  bool off_everywhere_ = false;
  std::shared_ptr<Engine> engine_;
  std::string no_engine_;  // why there is none
  std::optional<c10::Device> engine_device_;
};

// Who hears the one line a group logs, and what in it the user has to be warned of, if anything;
// set by the Python side.
using Log = std::function<void(const std::string& line, const std::string& warning)>;
void set_log(Log log);

// Who makes a rank's part in mori's all-gathers, for tensors on a device; set by the Python side.
using Mori = std::function<std::shared_ptr<ExternalOffer>(const Group&, c10::Device)>;
void set_mori(Mori mori);

}  // namespace pg_sdma
