// How the ranks of a group find out, together, whether they can use a transport.
//
// At construction each rank announces itself without blocking. The first direct operation votes in
// steps (transport/setup/roll_call.h); after each step every rank has every rank's answer, so one
// "no" is a "no" everywhere, with the same reason.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "transport/direct_transport.h"
#include "transport/external_all_gather.h"
#include "transport/setup/roll_call.h"
#include "transport/setup/self_test.h"

namespace pg_sdma {

class Rendezvous {
 public:
  struct Options {
    std::string group;  // for messages
    std::string lane;   // the device type: lanes of one group vote apart
    int rank = 0;
    int world = 1;
    bool enabled = true;   // PG_SDMA
    std::string settings;  // what must be equal on all ranks, as text
    uint64_t ring = 16;
    std::optional<std::chrono::microseconds> patience;  // none: the engine's default
    bool peer_copies = true;  // or staging buffers; else an external all-gather
    // How this rank comes by an external all-gather, where peer copies are not possible; throws
    // CannotShare with the reason when it cannot. None: whatever the reason, without one.
    std::function<std::shared_ptr<ExternalOffer>()> offer;
    std::string no_offer;  // why there is none, where there are no peer copies either
    bool slots = true;     // where there is a core a rank
    bool defer =
        false;  // late all-gathers, where the engine can: transport/agreement/late_protocol.h
    uint64_t tickets = 4096;  // exports of one rank that its peers can be told of at a time
    bool let_peers_read = true;
    bool allow_same_device = false;
    bool allow_pcie = false;
    std::string no_sums;  // why this rank cannot sum what a reduce-scatter brings; empty if it can
    std::function<void(const std::string&)> on_fault;  // DirectTransport::Options
  };

  struct Result {
    std::unique_ptr<DirectTransport> transport;  // null: the group uses the inner
    std::string reason;                          // why, the same on all ranks
    bool off_everywhere = false;                 // because every rank asked for that
    std::string no_sums;           // why reduce-scatters use the inner, the same on all ranks
    std::string no_peer_copies;    // why all-gathers are external, the same on all ranks
    bool settings_differ = false;  // that have to be the same on all ranks
  };

  // Gives this rank's engine; throws CannotShare with the reason when there is none.
  using EngineFactory = std::function<std::shared_ptr<Engine>()>;
  // Gathers known bytes over the transport into poisoned outputs.
  using SelfTest = std::function<TestResult(DirectTransport&)>;

  Rendezvous(Options options, std::shared_ptr<Board> board);

  // Announces this rank. Does not block.
  void join();
  // The inner carries an operation before the vote: the first is told to peers that wait for this
  // rank in vain. Does not throw.
  void note_elsewhere(const std::string& operation) {
    if (options_.enabled) roll_call_.note_elsewhere(operation);
  }
  // Blocks until every rank has voted. Throws std::runtime_error naming the ranks that have not
  // come after `timeout`, or whose process has ended.
  Result vote(const EngineFactory& engine, const SelfTest& self_test,
              std::chrono::milliseconds timeout);

 private:
  // One way of carrying all-gathers, put to the vote.
  struct Attempt {
    bool external = false;  // or by peer copies
    const EngineFactory& engine;
    const SelfTest& self_test;
    const std::vector<std::string>& records;
    const std::vector<int>& pids;
    Clock::time_point deadline;
  };
  Result decide(const EngineFactory& engine, const SelfTest& self_test, Clock::time_point deadline);
  Result attempt(const Attempt& asked);
  std::unique_ptr<DirectTransport> make_transport(std::shared_ptr<Engine> engine,
                                                  std::optional<ControlPage> page,
                                                  const std::vector<std::string>& engines,
                                                  const std::vector<int>& pids) const;
  Fields record() const;  // of this rank
  // Answers a step of the attempt; returns all ranks' answers.
  std::vector<std::string> ask(const std::string& step, const std::string& answer);

  Options options_;
  RollCall roll_call_;
  std::string attempt_;  // what the names of its steps begin with
};

}  // namespace pg_sdma
