// One group's exports and imports: tickets on the control page, peers' exports opened on first use,
// and both given back.
//
// What a peer has open stays allocated after its owner has freed it. So a thread of the group's
// looks now and then: owners take back the tickets of exports that are gone, importers close what
// has no ticket any more once their last copy is over.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "transport/control_page.h"

namespace pg_sdma {

class Sharing {
 public:
  // `identities`: Engine::identity() of each rank.
  Sharing(int rank, std::shared_ptr<Engine> engine, ControlPage& page,
          std::vector<std::string> identities);
  Sharing(const Sharing&) = delete;
  Sharing& operator=(const Sharing&) = delete;
  // Closes what is open, unless the device may still be copying.
  ~Sharing();

  // Makes [data, data + bytes) reachable for the peers, in operation `number`. Throws CannotShare.
  Place publish(const void* data, size_t bytes, uint64_t number);

  // A peer's export, opened when it is not. It stays open while operation `number` may use it.
  // Throws CannotShare.
  Mapping open(int peer, uint64_t export_id, uint64_t number);

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

  // Whether peers may yet look for the ticket of an own export. With the lock held.
  bool needed(uint64_t export_id) const;
  void withdraw_tickets();
  void close_imports();
  void start_thread();
  void look_now_and_then();

  const int rank_;
  const std::shared_ptr<Engine> engine_;
  ControlPage& page_;
  const std::vector<std::string> identities_;
  const pid_t process_;

  uint64_t withdrawn_for_ = 0;  // the last operation that looked for dead exports
  std::mutex mutex_;
  uint64_t published_for_ = 0;       // the last operation that published
  std::vector<uint64_t> published_;  // its exports
  // Own exports with a ticket on the page, and the last operation that keeps it there.
  std::map<uint64_t, uint64_t> posted_;
  std::map<Key, Import> imports_;
  uint64_t settled_ = 0;
  uint64_t last_direct_ = 0;
  bool kept_open_ = false;
  bool stopping_ = false;
  std::condition_variable stop_;
  std::thread thread_;
};

}  // namespace pg_sdma
