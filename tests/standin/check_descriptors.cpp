// Descriptors from owner to importer, where one of the two does not come to its part.
#include <atomic>
#include <sstream>

#include "checks.h"
#include "engine/descriptor_server.h"

using namespace pg_sdma;
using namespace standin_test;

namespace {

constexpr size_t kChunk = size_t{1} << 16;
constexpr size_t kChunks = 6;

// This process, which opens what it has exported as a peer would.
class Owner {
 public:
  Owner() : engine_(engine_on(0)), segment_(kChunks * kChunk, kChunk, 0) {
    for (size_t i = 0; i < kChunks; ++i) segment_.data()[i * kChunk] = content(i);
  }

  Engine& engine() const { return *engine_; }

  Ticket ticket(size_t first, size_t count) const {
    const Place place = engine_->publish(segment_.data() + first * kChunk, count * kChunk);
    return engine_->ticket(place.export_id);
  }

  Mapping open(const Ticket& ticket) const { return engine_->open(engine_->identity(), ticket); }

  // Whether all chunks from `first` on are there.
  static bool holds(const Mapping& mapping, size_t first) {
    const auto* bytes = reinterpret_cast<unsigned char*>(mapping.base);
    for (size_t i = 0; i < mapping.bytes / kChunk; ++i) {
      if (bytes[i * kChunk] != content(first + i)) return false;
    }
    return true;
  }

  // As Engine::identity() of one whose descriptors are served at `socket`.
  std::string identity_at(const std::string& socket) const {
    return word(0) + " " + word(1) + " " + socket;
  }
  std::string socket() const { return word(2); }

 private:
  static unsigned char content(size_t chunk) { return static_cast<unsigned char>(chunk + 1); }

  std::string word(int index) const {
    std::istringstream words(engine_->identity());  // "<uuid> <process> <socket>"
    std::string word;
    for (int i = 0; i <= index; ++i) words >> word;
    return word;
  }

  const std::shared_ptr<Engine> engine_;
  const Buffer segment_;
};

CHECK(descriptors_that_do_not_come_hold_up_no_other_import) {
  const Owner owner;
  std::atomic<bool> asked = false;
  std::atomic<bool> answer = false;
  std::atomic<bool> over = false;
  const std::string silent = owner.socket() + "-silent";
  DescriptorServer::Source source;
  source.chunks = [&](uint64_t, size_t, size_t, Segment&) -> std::vector<Chunk> {
    asked = true;
    while (!answer) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    throw CannotShare("nothing is here");
  };
  const DescriptorServer server(silent, source);
  std::thread waits([&] {
    Ticket ticket;
    ticket.export_id = 1;
    ticket.bytes = kChunk;
    ticket.descriptors = 1;
    refusal([&] { owner.engine().open(owner.identity_at(silent), ticket); });
    over = true;
  });
  REQUIRE(soon([&] { return asked.load(); }));
  const Mapping mapping = owner.open(owner.ticket(0, 3));
  REQUIRE(Owner::holds(mapping, 0));
  REQUIRE(owner.engine().closing_waits(mapping) == false);
  owner.engine().close(mapping);
  REQUIRE(!over);
  answer = true;
  waits.join();
  REQUIRE(standin_mapped() == 0);
}

CHECK(descriptors_are_served_beside_a_peer_that_asks_nothing) {
  const Owner owner;
  const Ticket ticket = owner.ticket(0, 3);
  DescriptorClient silent(owner.socket(), getpid());
  const Mapping mapping = owner.open(ticket);
  REQUIRE(Owner::holds(mapping, 0));
  owner.engine().close(mapping);
  Segment segment;
  REQUIRE(silent.chunks(ticket.export_id, ticket.descriptors, segment).size() == 3);
}

// The same export and others that have chunks in common with it, opened and closed side by side.
CHECK(chunks_are_opened_by_many_threads_at_a_time) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 150;
  const Owner owner;
  std::vector<Ticket> tickets;
  for (size_t first = 0; first + 2 < kChunks; ++first) tickets.push_back(owner.ticket(first, 3));
  std::atomic<int> arrived = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (int round = 0; round < kRounds; ++round) {
        ++arrived;
        while (arrived < kThreads * (round + 1)) std::this_thread::yield();
        // Half of the rounds all open one export, and half neighbours.
        const size_t first = (round + (round % 2) * thread) % tickets.size();
        const Mapping mapping = owner.open(tickets[first]);
        REQUIRE(Owner::holds(mapping, first));
        owner.engine().close(mapping);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  REQUIRE(standin_mapped() == 0);
}

}  // namespace
