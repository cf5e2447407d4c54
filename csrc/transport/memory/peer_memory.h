// One group's exports and imports: tickets on the control page, peers' exports opened on first use,
// and both given back.
//
// What a peer has open stays allocated after its owner has freed it. So a thread of the group's
// looks some hundred times a second: owners take back the tickets of exports that are gone,
// importers close what has no ticket any more once their last copy is over (closing.h).
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "transport/memory/closing.h"
#include "transport/memory/control_page.h"

namespace pg_sdma {

class PeerMemory {
 public:
  // For how long open() tries again what failed: where peers wait for the answer, and where they
  // count on this rank whatever it takes.
  static constexpr std::chrono::milliseconds kBriefly{3};
  static constexpr std::chrono::milliseconds kStubbornly{2000};

  // `identities`: Engine::identity() of each rank.
  PeerMemory(int rank, std::shared_ptr<Engine> engine, ControlPage& page,
             std::vector<std::string> identities);
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;
  // Closes what is open, unless the device may still be copying.
  ~PeerMemory();

  // Makes [data, data + bytes) reachable for the peers, in operation `number`. Throws CannotShare.
  Place publish(const void* data, size_t bytes, uint64_t number);

  // A peer's export, opened when it is not. It stays open while operation `number` may use it.
  // Throws CannotShare, once it has failed for as long as `retry`.
  Mapping open(int peer, uint64_t export_id, uint64_t number,
               std::chrono::milliseconds retry = kBriefly);

  // Operation `number`, which is direct, is enqueued from here on.
  void begin(uint64_t number);
  // Operation `number` is enqueued (direct), or has gone elsewhere.
  void settle(uint64_t number, bool direct);

  // Peers that are late look for the tickets of operation `number`, the one being agreed on, until
  // it is done: those stay meanwhile, though a part of the memory be gone that the operation does
  // not use. A new export that would take a ticket's place cannot be shared then.
  void keep_tickets(uint64_t number);

  // Closes nothing from here on, not even at the end.
  void keep_open();

 private:
  using Key = std::pair<int, uint64_t>;  // peer, export id
  struct Import {
    Mapping mapping;
    uint64_t last_use = 0;  // the last operation that opened it
  };
  // An own export with a ticket on the page.
  struct Posted {
    uintptr_t first = 0;  // where it lies
    uintptr_t end = 0;
    uint64_t kept_for = 0;  // the last operation that keeps the ticket there
  };
  using PostedById = std::map<uint64_t, Posted>;

  // Whether peers may yet look for the ticket of an own export. With the lock held.
  bool needed(uint64_t export_id, const Posted& posted) const;
  // Of exports that are gone: those among [first, end), or the next few.
  void withdraw_tickets_between(uintptr_t first, uintptr_t end);
  void withdraw_some_tickets();
  void withdraw_where_gone(const std::vector<uint64_t>& exports);
  PostedById::iterator forget(PostedById::iterator posted);
  void add_ticket(const Ticket& ticket, uintptr_t first);
  Mapping open_once(int peer, uint64_t export_id, uint64_t number);
  bool idle() const;
  void give_imports();  // those that are not needed
  void start_thread();
  void look_often();

  const int rank_;
  const std::shared_ptr<Engine> engine_;
  ControlPage& page_;
  const std::vector<std::string> identities_;
  const pid_t process_;
  const std::shared_ptr<Closing> closing_;  // null where nothing is opened

  std::mutex mutex_;
  uint64_t published_for_ = 0;       // the last operation that published
  std::vector<uint64_t> published_;  // its exports
  PostedById posted_;
  std::multimap<uintptr_t, uint64_t> posted_at_;  // by where they begin
  uintptr_t longest_posted_ = 0;                  // bytes
  uint64_t next_looked_at_ = 0;                   // of posted_
  std::map<Key, Import> imports_;
  std::vector<uint64_t> withdrawn_;  // by each peer, when its imports were last looked at
  bool some_in_use_ = false;         // of those whose tickets were gone then
  uint64_t settled_ = 0;
  uint64_t last_direct_ = 0;
  std::atomic<uint64_t> begun_ = 0;
  bool kept_open_ = false;
  bool stopping_ = false;
  std::condition_variable stop_;
  std::thread thread_;
};

}  // namespace pg_sdma
