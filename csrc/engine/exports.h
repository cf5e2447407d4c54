// What this process exports of one device's memory: allocations found under tensors by the driver's
// attributes, each exported once.
//
// An allocation is known by the driver's ids, not by its address: memory that was freed and
// allocated again at the same address is another export. Exports of an expandable segment may
// share physical chunks, each of which has one number for all of them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "engine/descriptor_server.h"
#include "engine/driver.h"
#include "engine/engine.h"

namespace pg_sdma {

class Exports {
 public:
  // The driver's context must be current, as in every call. Throws driver::Failure.
  Exports(const driver::Library& library, int device);

  // Finds or makes the export that [data, data + bytes) lies in. Throws CannotShare.
  Place publish(const void* data, size_t bytes);

  // How peers open an export that publish() has returned and that is still live. What is left of it
  // can be opened until as many give_up().
  Ticket ticket(uint64_t export_id);
  void give_up(uint64_t export_id);

  // Whether the export's memory is still what was exported: once it is not, it never is again.
  bool live(uint64_t export_id);

  // For its peers: chunks [first, first + count) of an export, and descriptors of some. Throw
  // CannotShare when the memory has gone since.
  std::vector<Chunk> chunks(uint64_t export_id, size_t first, size_t count, Segment& segment);
  std::vector<Descriptor> descriptors(uint64_t export_id, const std::vector<uint64_t>& serials);

 private:
  using Address = driver::Address;

  // The driver's ids of the memory at an address: of the allocation, and of what backs it.
  struct Ids {
    uint64_t buffer = 0;
    uint64_t block = 0;
    bool operator==(const Ids&) const = default;
  };
  // One allocation of the driver: a whole segment, or a physical chunk of an expandable one.
  struct Piece {
    Address base = 0;
    size_t bytes = 0;
    Ids ids;
    uint64_t serial = 0;  // of a chunk
  };
  struct Export {
    std::vector<Piece> pieces;  // adjoining
    Segment segment;
    bool by_descriptor = false;
    driver::IpcHandle handle;  // when not by descriptor
    bool dead = false;
    int tickets = 0;

    Address base() const { return pieces.front().base; }
    Address end() const { return pieces.back().base + pieces.back().bytes; }
  };

  Ids ids_at(Address address) const;
  bool unchanged(const Export& found, Address first, Address end) const;
  Export examine(Address first, Address end);
  uint64_t serial_of(const Piece& chunk);
  Export& find(uint64_t export_id);  // throws CannotShare
  void bury(uint64_t export_id, Export& dead);

  const driver::Library& library_;
  const int device_;
  const int id_attributes_;  // of {buffer id, block id}: older drivers lack the second
  std::mutex mutex_;
  uint64_t last_id_ = 0;
  std::unordered_map<uint64_t, Export> exports_;
  std::multimap<Address, uint64_t> by_base_;  // those that are not dead
  size_t longest_ = 0;                        // bytes of an export
  uint64_t last_serial_ = 0;
  std::map<Address, Piece> chunks_;  // as last exported
};

}  // namespace pg_sdma
