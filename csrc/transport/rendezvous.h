// How the ranks of a group find out, together, whether they can use a transport.
//
// At construction each rank posts a record without blocking. The first direct operation collects
// all of them and votes in steps; after each step every rank reads every rank's answer, so one "no"
// is a "no" everywhere, with the same reason.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "transport/courier.h"
#include "transport/direct_transport.h"

namespace pg_sdma {

// The group's store, as far as the vote needs it.
class Board {
 public:
  virtual ~Board() = default;
  virtual void post(const std::string& key, const std::string& value) = 0;
  // Waits until all keys are there, at most for `timeout`. Returns what they hold, nothing for the
  // ones that never came. Throws std::runtime_error when it cannot go on.
  virtual std::vector<std::optional<std::string>> collect(const std::vector<std::string>& keys,
                                                          std::chrono::milliseconds timeout) = 0;
};

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
    bool peer_copies = true;                            // or slots; else by a courier or not at all
    // How this rank comes by a courier, where peer copies are not possible; throws CannotShare with
    // the reason when it cannot. None: whatever the reason, without one.
    std::function<std::shared_ptr<CourierOffer>()> offer;
    std::string no_offer;     // why there is none, where there are no peer copies either
    bool slots = true;        // where there is a core a rank
    bool defer = false;       // late all-gathers, where the engine can: transport/arrival.h
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
    std::string no_sums;         // why reduce-scatters use the inner, the same on all ranks
    std::string no_peer_copies;  // why all-gathers go by a courier, the same on all ranks
  };

  // Gives this rank's engine; throws CannotShare with the reason when there is none.
  using EngineFactory = std::function<std::shared_ptr<Engine>()>;
  // Gathers known bytes over the transport into poisoned outputs; returns what was wrong on this
  // rank.
  using SelfTest = std::function<std::string(DirectTransport&)>;

  Rendezvous(Options options, std::shared_ptr<Board> board);

  // Posts this rank's record. Does not block.
  void join();
  // The inner carries an operation before the vote: the first is told to peers that wait for this
  // rank in vain. Does not throw.
  void note_elsewhere(const std::string& operation);
  // Blocks until every rank has voted. Throws std::runtime_error naming the ranks that have not
  // come after `timeout`, or whose process has ended.
  Result vote(const EngineFactory& engine, const SelfTest& self_test,
              std::chrono::milliseconds timeout);

 private:
  // One way of carrying all-gathers, put to the vote.
  struct Attempt {
    bool by_courier = false;  // or by peer copies
    const EngineFactory& engine;
    const SelfTest& self_test;
    const std::vector<std::string>& records;
    const std::vector<int>& pids;
    Clock::time_point deadline;
  };
  Result attempt(const Attempt& asked);
  std::unique_ptr<DirectTransport> make_transport(std::shared_ptr<Engine> engine,
                                                  std::optional<ControlPage> page,
                                                  const std::vector<std::string>& engines,
                                                  const std::vector<int>& pids) const;
  // Answers a step of the attempt, and hears why a rank says no; nothing when none does.
  std::optional<std::string> ask(const std::string& step, const std::string& answer,
                                 Clock::time_point deadline);

  std::vector<std::string> collect(const std::string& step, Clock::time_point deadline);
  std::string first_operation_of(int rank) const;  // in a message, in brackets
  [[noreturn]] void fail(const std::string& what, const std::string& step) const;
  void post(const std::string& step, const std::string& value);
  std::string key(const std::string& step, int rank) const;

  Options options_;
  std::shared_ptr<Board> board_;
  std::unique_ptr<Peers> peers_;  // while voting, once the records are known; null: cannot be
  std::string attempt_;           // what the keys of its steps begin with
  std::chrono::milliseconds timeout_{0};
  std::string first_elsewhere_;  // of this rank
};

}  // namespace pg_sdma
