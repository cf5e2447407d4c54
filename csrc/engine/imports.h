// Peers' exports as this process has them mapped. Groups that import the same export share one
// mapping, and exports of one segment the physical chunks that they have in common: each is mapped
// once, where it lies in its owner's segment.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/descriptor_server.h"
#include "engine/driver.h"
#include "engine/engine.h"

namespace pg_sdma {

// The process that owns an export, and where it hands out descriptors.
struct Owner {
  int process = 0;
  std::string socket;
};

class Imports {
 public:
  Imports(const driver::Library& library, int device) : library_(library), device_(device) {}

  // The driver's context must be current. Of an export by descriptors what is left is opened.
  // Throws CannotShare.
  Mapping open(const Owner& owner, const Ticket& ticket);
  void close(const Mapping& mapping);
  // Whether it is mapped chunk by chunk. On driver 580 unmapping those waits for nothing.
  bool in_chunks(const Mapping& mapping) const;

 private:
  using Address = driver::Address;
  using Lock = std::unique_lock<std::mutex>;
  using Key = std::pair<std::string, uint64_t>;  // the owner's socket name, export id

  // Reserved addresses for a segment of an owner's, at the same distances from one another. Chunks
  // that have come where others are still mapped make another one, for the export that has them.
  using WindowKey =
      std::tuple<std::string, uint64_t, uint64_t, uint64_t>;  // socket, segment, export
  struct Mapped {
    uint64_t serial = 0;
    uint64_t bytes = 0;
    uint64_t users = 0;  // those that have yet to fetch it included
    bool there = false;
  };
  struct Window {
    Segment segment;
    Address base = 0;
    std::map<uint64_t, Mapped> chunks;  // by their addresses in the segment
    Address here(uint64_t address) const { return base + (address - segment.base); }
  };
  using Windows = std::map<WindowKey, Window>;

  struct Import {
    Key key;
    Address base = 0;
    uint64_t bytes = 0;
    uint64_t users = 0;
    bool by_descriptor = false;
    WindowKey window;
    std::vector<Chunk> chunks;  // of it
  };

  // With the lock held, as all that follow. Those that take it let go of it while they wait for the
  // owner: a process that is stopped or busy must hold up nobody but who asks it.
  void map_chunks(const Owner& owner, const Ticket& ticket, Import& into, Lock& lock);
  void map_missing(DescriptorClient& client, Window& window, uint64_t export_id,
                   const std::vector<Chunk>& chunks, Lock& lock);
  Mapping again(uint64_t number);
  Windows::iterator window_for(const Owner& owner, uint64_t export_id, const Segment& segment,
                               const std::vector<Chunk>& chunks);
  void map(const Descriptor& descriptor, Address at, Mapped& chunk);
  void give_back(Windows::iterator window, const std::vector<Chunk>& chunks);

  const driver::Library& library_;
  const int device_;
  mutable std::mutex mutex_;
  uint64_t last_number_ = 0;
  std::map<Key, uint64_t> numbers_;
  std::map<uint64_t, Import> imports_;
  Windows windows_;
};

}  // namespace pg_sdma
