// What moves bytes: exports, imports and copies memory, and orders that work on queues.
//
// An engine knows no ranks and no c10d. The host engine executes a program on the calling thread;
// a GPU engine enqueues it on a stream and returns. The transport writes the same program for both.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace pg_sdma {

// A 64-bit counter on the control page. Counters only grow and never wrap (HIP compares unsigned).
using Counter = std::atomic<uint64_t>;
static_assert(sizeof(Counter) == 8 && Counter::is_always_lock_free);

// Where a tensor lies, as peers are told: an export of its owner and an offset into it.
struct Place {
  uint64_t export_id = 0;
  uint64_t offset = 0;
};

// How a peer opens an export: plain bytes that travel through the control page.
struct Ticket {
  uint64_t export_id = 0;
  uint64_t bytes = 0;  // length of the exported range; peers refuse places that leave it
  // 0: the handle says all; otherwise so many descriptors follow over the group's socket.
  uint32_t descriptors = 0;
  uint32_t reserved = 0;
  std::array<unsigned char, 64> handle{};
};

// A peer's export as this process reaches it. `space` tells address spaces apart where addresses
// alone do not (the host engine's process id); the GPU engines map and leave it 0. `number` is the
// engine's.
struct Mapping {
  uint64_t space = 0;
  uintptr_t base = 0;
  uint64_t bytes = 0;
  uint64_t number = 0;
};

// A launch of a device kernel, on one row of thread blocks; or a function, of an engine that runs
// programs on the calling thread.
struct Launch {
  std::function<void()> call;
  void* function = nullptr;  // the driver's handle
  unsigned blocks = 0;
  unsigned threads = 0;  // a block
  unsigned shared_bytes = 0;
  // Each of 8 bytes. What the kernel does not take is not looked at.
  std::array<uint64_t, 8> arguments{};
};

// One step of a program. Steps run in order, but for launches: they run beside the other steps, in
// order among themselves, each behind the last kFork before it; on the calling thread in their
// place.
struct Step {
  enum class Kind : uint8_t { kWait, kWrite, kCopy, kFork, kLaunch, kMark, kJoin } kind;
  Counter* counter = nullptr;  // kWait: until *counter >= value; kWrite: *counter = value
  // kMark: mark number `value` is set behind the launches so far; kJoin: steps wait for the
  // launches before that mark. Marks are numbered from 0, without gaps.
  uint64_t value = 0;
  void* destination = nullptr;  // kCopy
  uint64_t space = 0;           // address space of `source`, 0 for this process
  uintptr_t source = 0;
  size_t bytes = 0;
  const Launch* launch = nullptr;  // kLaunch: it lives until the program has been enqueued
  // Steps of one track run in order. Those of different tracks above 0 may run side by side,
  // between the steps of track 0 before them and behind them. Those of kBeside may do so wherever
  // streams can, and until the program ends: no other step waits for them.
  uint32_t track = 0;
  static constexpr uint32_t kBeside = UINT32_MAX;

  static Step wait(Counter& counter, uint64_t value) {
    return {Kind::kWait, &counter, value, nullptr, 0, 0, 0};
  }
  static Step write(Counter& counter, uint64_t value) {
    return {Kind::kWrite, &counter, value, nullptr, 0, 0, 0};
  }
  static Step copy(void* destination, uint64_t space, uintptr_t source, size_t bytes) {
    return {Kind::kCopy, nullptr, 0, destination, space, source, bytes};
  }
  Step on(uint32_t number) const {
    Step step = *this;
    step.track = number;
    return step;
  }
  static Step fork() { return {Kind::kFork}; }
  static Step start(const Launch& launch) {
    Step step{Kind::kLaunch};
    step.launch = &launch;
    return step;
  }
  static Step mark(uint64_t number) { return {Kind::kMark, nullptr, number}; }
  static Step join(uint64_t number) { return {Kind::kJoin, nullptr, number}; }
};
using Program = std::vector<Step>;

// What lies between two devices, as far as copies care. kFabric: NVLink, XGMI.
enum class Link : uint8_t { kHostMemory, kSameDevice, kFabric, kPcie, kNone };

// What an engine does not take on trust of its driver.
struct Doubts {
  std::vector<size_t> copy_sizes;  // bytes around which copies take another way
  bool waits = false;              // whether a stream that waits does wait
};

// Why a piece of memory cannot be exported or opened here. The call then takes the inner.
class CannotShare : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A copy of a program failed: its `space`, and why.
class CopyFailed : public std::runtime_error {
 public:
  CopyFailed(uint64_t space, const std::string& why) : std::runtime_error(why), space(space) {}
  const uint64_t space;
};

// How an engine that runs programs on the calling thread sleeps on the control page and tells
// sleeping peers. `wait` throws when the wait cannot end (peer gone, timeout, abort).
class Waiter {
 public:
  virtual ~Waiter() = default;
  virtual void wait(Counter& counter, uint64_t value) = 0;
  virtual void wrote() = 0;
};

// An in-order queue of one group, with the point its last program ends at.
class Queue {
 public:
  virtual ~Queue() = default;
  // Where later programs run, behind those before them: on the queue's own stream, behind all that
  // the caller's current stream holds now; or on that stream itself, which costs no events.
  virtual void follow_caller() = 0;
  virtual void use_callers_stream() = 0;
  virtual void run(const Program& program, Waiter& waiter) = 0;
  // The caller's current stream continues only after the programs run so far.
  virtual void caller_follows() = 0;
  // Later programs start after all that `stream`, another of this device's streams, holds now: that
  // is nothing where it is recording a graph.
  virtual void follow(void* stream) = 0;
  // Whether the caller's current stream is recording a graph, whose work has no place in the order
  // of programs: it runs when the graph is launched.
  virtual bool caller_records() const { return false; }
  // A marker of the programs run so far, for an asynchronous Work.
  class Marker {
   public:
    virtual ~Marker() = default;
    virtual bool passed() = 0;
    virtual void caller_follows() = 0;
  };
  virtual std::shared_ptr<Marker> mark() = 0;
  // The same of what the caller's current stream holds now.
  virtual std::shared_ptr<Marker> mark_caller() = 0;
};

class Engine {
 public:
  virtual ~Engine() = default;
  virtual std::string name() const = 0;

  // False: a program has run when Queue::run returns, and data is ready once it is published.
  virtual bool stream_ordered() const = 0;
  // Whether copies to a peer's memory are faster than copies from there: all-gathers then push
  // their shards into the peers' outputs.
  virtual bool pushes() const { return false; }
  // Bytes of its shard that a rank copies before it turns to the same bytes of its peers' shards:
  // so few that they still lie in a cache that all ranks share. Of an engine whose programs run on
  // the calling thread.
  virtual size_t wave_bytes() const { return SIZE_MAX; }
  // Bytes of output over all ranks from which an all-gather is better off here than with the inner.
  virtual uint64_t least_bytes() const { return 0; }
  // The same of a reduce-scatter's input.
  virtual uint64_t least_sum_bytes() const { return 0; }
  // True: peers' exports must be opened before use, and opening may be refused.
  virtual bool opens_exports() const = 0;

  // Makes [data, data + bytes) reachable for peers. Throws CannotShare.
  virtual Place publish(const void* data, size_t bytes) = 0;
  // Throws CannotShare where peers could not copy from there although it was published. It looks at
  // one byte: a tensor lies in one mapping.
  virtual void check_readable(const void*) const {}
  // How peers open an export that publish() has told. Throws CannotShare once it is not live(). As
  // long as there are more of these than give_up(), peers can open what is left of it.
  virtual Ticket ticket(uint64_t export_id) = 0;
  virtual void give_up(uint64_t) {}
  // Whether an export's memory is still allocated. One that is not never comes back: peers should
  // close it, because memory stays with the device until they do.
  virtual bool live(uint64_t) { return true; }
  // Opens a peer's export; `identity` is what the peer's engine gave as identity(). Throws
  // CannotShare.
  virtual Mapping open(const std::string& identity, const Ticket& ticket) = 0;
  virtual void close(const Mapping& mapping) = 0;
  // Whether close() may not return before every stream of this process has gone on.
  virtual bool closing_waits(const Mapping&) const { return false; }

  // What peers must know of this engine to open its exports (the host engine: its process id).
  virtual std::string identity() const = 0;

  // True: a queue that waits may hold up others of this process, so operations of all its groups
  // have to be enqueued one at a time, each from its agreement on.
  virtual bool shares_hardware_queues() const { return false; }

  // What the self-test has to look at besides.
  virtual Doubts doubts() const { return {}; }

  // How this engine's device reaches the one of the peer whose identity() is given.
  virtual Link link_to(const std::string& identity) const = 0;

  // Whether the caller's current stream is recording a graph. Programs cannot be recorded.
  virtual bool capturing() const { return false; }

  // A queue whose programs wait and write on counters in [page, page + bytes), host memory that
  // outlives it. Programs of an engine that runs them on the calling thread also copy to and from
  // there, for peers.
  virtual std::unique_ptr<Queue> queue(void* page, size_t bytes) = 0;
};

}  // namespace pg_sdma
