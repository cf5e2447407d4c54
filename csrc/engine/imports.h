// Peers' exports as this process has them mapped. Groups that import the same export share one
// mapping.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

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

  // The driver's context must be current. Throws CannotShare.
  Mapping open(const Owner& owner, const Ticket& ticket);
  void close(const Mapping& mapping);
  // Whether it is mapped chunk by chunk. On driver 580 unmapping those waits for nothing.
  bool in_chunks(const Mapping& mapping) const;

 private:
  using Address = driver::Address;
  using Key = std::pair<std::string, uint64_t>;  // the owner's socket name, export id
  struct Import {
    Key key;
    uint64_t bytes = 0;
    uint64_t users = 0;
    std::vector<uint64_t> chunks;  // bytes of each; empty when opened by handle
  };

  Address map_chunks(const Owner& owner, const Ticket& ticket, std::vector<uint64_t>& chunks);
  void unmap_chunks(Address base, uint64_t reserved, const std::vector<uint64_t>& chunks);

  const driver::Library& library_;
  const int device_;
  mutable std::mutex mutex_;
  std::map<Key, Address> bases_;
  std::map<Address, Import> imports_;
};

}  // namespace pg_sdma
