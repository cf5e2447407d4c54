// What this process exports of one device's memory: allocations found under tensors by the driver's
// attributes, each exported once.
//
// An allocation is known by the driver's ids, not by its address: memory that was freed and
// allocated again at the same address is another export.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
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

  // How peers open an export that publish() has returned and that is still live.
  Ticket ticket(uint64_t export_id);

  // Whether the export's memory is still what was exported; an export found dead is forgotten.
  bool live(uint64_t export_id);

  // Descriptors of chunks [first, first + count) of an export, for its peers. Throws CannotShare
  // when the memory has gone since.
  std::vector<Descriptor> descriptors(uint64_t export_id, size_t first, size_t count);

 private:
  using Address = driver::Address;

  // The driver's ids of the memory at an address: of the allocation, and of what backs it.
  struct Ids {
    uint64_t buffer = 0;
    uint64_t block = 0;
    bool operator==(const Ids&) const = default;
  };
  // One allocation of the driver: a whole segment, or a physical chunk of an expandable one.
  struct Chunk {
    Address base = 0;
    size_t bytes = 0;
    Ids ids;
  };
  struct Export {
    uint64_t id = 0;
    std::vector<Chunk> chunks;  // adjoining
    bool by_descriptor = false;
    driver::IpcHandle handle;  // when not by descriptor

    Address base() const { return chunks.front().base; }
    Address end() const { return chunks.back().base + chunks.back().bytes; }
  };
  using ByBase = std::multimap<Address, Export>;

  Ids ids_at(Address address) const;
  bool unchanged(const Export& found, Address first, Address end) const;
  Export examine(Address first, Address end) const;
  ByBase::iterator find(uint64_t export_id);

  const driver::Library& library_;
  const int device_;
  const int id_attributes_;  // of {buffer id, block id}: older drivers lack the second
  std::mutex mutex_;
  uint64_t last_id_ = 0;
  ByBase exports_;
};

}  // namespace pg_sdma
