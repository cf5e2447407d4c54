#include "engine/imports.h"

#include <algorithm>
#include <stdexcept>

#include "engine/descriptor_server.h"

namespace pg_sdma {

Mapping Imports::open(const Owner& owner, const Ticket& ticket) {
  const Key key{owner.socket, ticket.export_id};
  std::lock_guard<std::mutex> lock(mutex_);
  const auto known = bases_.find(key);
  if (known != bases_.end()) {
    Import& import = imports_.at(known->second);
    ++import.users;
    return {0, static_cast<uintptr_t>(known->second), import.bytes};
  }
  Import import{key, ticket.bytes, 1, {}};
  Address base = 0;
  try {
    if (ticket.descriptors > 0) {
      base = map_chunks(owner, ticket, import.chunks);
    } else {
      driver::IpcHandle handle;
      std::copy(ticket.handle.begin(), ticket.handle.end(), handle.bytes.begin());
      library_.must(library_.open_ipc_handle, &base, handle, driver::kLazyPeerAccess);
    }
  } catch (const std::runtime_error& error) {
    throw CannotShare("memory of process " + std::to_string(owner.process) +
                      " cannot be opened on device " + std::to_string(device_) + ": " +
                      error.what());
  }
  bases_.emplace(key, base);
  imports_.emplace(base, std::move(import));
  return {0, static_cast<uintptr_t>(base), ticket.bytes};
}

void Imports::close(const Mapping& mapping) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = imports_.find(mapping.base);
  if (found == imports_.end() || --found->second.users > 0) return;
  const Import import = std::move(found->second);
  imports_.erase(found);
  bases_.erase(import.key);
  // A driver that refuses has been shut down, and the mapping with it.
  if (import.chunks.empty()) {
    library_.close_ipc_handle(mapping.base);
  } else {
    unmap_chunks(mapping.base, import.bytes, import.chunks);
  }
}

bool Imports::in_chunks(const Mapping& mapping) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = imports_.find(mapping.base);
  return found != imports_.end() && !found->second.chunks.empty();
}

Imports::Address Imports::map_chunks(const Owner& owner, const Ticket& ticket,
                                     std::vector<uint64_t>& chunks) {
  Address base = 0;
  library_.must(library_.reserve_addresses, &base, ticket.bytes, 0, 0, 0);
  uint64_t mapped = 0;
  try {
    fetch_descriptors(
        owner.socket, owner.process, ticket.export_id, ticket.descriptors,
        [&](const Descriptor& descriptor) {
          if (descriptor.bytes() > ticket.bytes - mapped) {
            throw std::runtime_error("chunks that are larger than their export");
          }
          driver::MemoryHandle handle = 0;
          void* shareable = reinterpret_cast<void*>(static_cast<intptr_t>(descriptor.number()));
          library_.must(library_.import_allocation, &handle, shareable, driver::kPosixDescriptor);
          const int result = library_.map(base + mapped, descriptor.bytes(), 0, handle, 0);
          // The mapping holds the memory from here on.
          library_.release_allocation(handle);
          if (result != driver::kSuccess) {
            throw driver::Failure(result, library_.explain(library_.map.name, result));
          }
          chunks.push_back(descriptor.bytes());
          mapped += descriptor.bytes();
        });
    if (mapped != ticket.bytes) throw std::runtime_error("chunks that do not fill their export");
    const driver::AccessDescription access{{driver::kOnDevice, device_}, driver::kReadWrite};
    library_.must(library_.set_access, base, ticket.bytes, &access, 1);
  } catch (...) {
    unmap_chunks(base, ticket.bytes, chunks);
    throw;
  }
  return base;
}

void Imports::unmap_chunks(Address base, uint64_t reserved, const std::vector<uint64_t>& chunks) {
  Address at = base;
  for (const uint64_t bytes : chunks) {
    library_.unmap(at, bytes);
    at += bytes;
  }
  library_.free_addresses(base, reserved);
}

}  // namespace pg_sdma
