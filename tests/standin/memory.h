// The device memory that this process has: what backs it, and where it is mapped.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "state.h"

namespace standin {

// What backs an allocation.
struct Physical {
  int file = -1;
  size_t bytes = 0;
  int device = 0;
  bool exportable = false;  // by descriptor
  uint64_t id = 0;
  std::string name;  // the same in every process that has it

  ~Physical();
};
using PhysicalPtr = std::shared_ptr<Physical>;

// Where something is mapped.
struct Region {
  enum class Kind { kAllocation, kManaged, kImport, kChunk } kind;
  size_t bytes = 0;
  PhysicalPtr physical;
  uint64_t buffer_id = 0;
  bool access = true;
  int users = 1;
};

struct Handle {
  PhysicalPtr physical;
  int references = 1;
};

// All under memory_mutex.
extern std::mutex memory_mutex;
extern std::map<Address, Region> regions;
extern std::map<Address, size_t> reservations;
extern std::map<MemoryHandle, Handle> handles;

PhysicalPtr create(size_t bytes, int device, bool exportable);
Address map_at(Address fixed, const Physical& physical, size_t bytes);  // 0: anywhere
void forget(std::map<Address, Region>::iterator region);
std::map<Address, Region>::iterator region_at(Address address);

}  // namespace standin
