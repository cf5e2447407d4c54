#include "engine/exports.h"

#include <algorithm>
#include <string>
#include <utility>

namespace pg_sdma {

using driver::Failure;
using driver::PointerAttribute;

namespace {

// What the driver says of an address. Zeros for memory that it does not know.
struct Attributes {
  unsigned memory_type = 0;
  unsigned managed = 0;
  int device = 0;
  unsigned ipc_capable = 0;
  driver::Address base = 0;
  size_t bytes = 0;
  uint64_t handle_types = 0;
  void* pool = nullptr;
};

Attributes attributes_of(const driver::Library& library, driver::Address address) {
  Attributes found;
  PointerAttribute names[] = {
      driver::kMemoryType, driver::kIsManaged, driver::kDeviceOrdinal,      driver::kIpcCapable,
      driver::kRangeStart, driver::kRangeSize, driver::kAllowedHandleTypes, driver::kMemoryPool};
  void* values[] = {&found.memory_type, &found.managed, &found.device,       &found.ipc_capable,
                    &found.base,        &found.bytes,   &found.handle_types, &found.pool};
  library.must(library.pointer_attributes, std::size(names), names, values, address);
  return found;
}

}  // namespace

Exports::Exports(const driver::Library& library, int device) : library_(library), device_(device) {
  ids_at(0);  // what fails here is not the attribute's fault
  id_attributes_ = 2;
  try {
    ids_at(0);
  } catch (const Failure&) {
    id_attributes_ = 1;
  }
}

Place Exports::publish(const void* data, size_t bytes) {
  const auto first = reinterpret_cast<Address>(data);
  const Address end = first + bytes;
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto next = exports_.upper_bound(first); next != exports_.begin();) {
    const auto found = std::prev(next);
    if (found->second.end() < end) {
      next = found;
      continue;
    }
    if (unchanged(found->second, first, end)) return {found->second.id, first - found->first};
    next = exports_.erase(found);
  }
  try {
    Export made = examine(first, end);
    made.id = ++last_id_;
    const Place place{made.id, first - made.base()};
    exports_.emplace(made.base(), std::move(made));
    return place;
  } catch (const Failure& failure) {
    throw CannotShare(failure.what());
  }
}

Ticket Exports::ticket(uint64_t export_id) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = find(export_id);
  if (found == exports_.end()) throw CannotShare("memory that was freed while it was shared");
  const Export& shared = found->second;
  Ticket ticket;
  ticket.export_id = export_id;
  ticket.bytes = shared.end() - shared.base();
  if (shared.by_descriptor) {
    ticket.descriptors = static_cast<uint32_t>(shared.chunks.size());
  } else {
    std::copy(shared.handle.bytes.begin(), shared.handle.bytes.end(), ticket.handle.begin());
  }
  return ticket;
}

bool Exports::live(uint64_t export_id) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = find(export_id);
  if (found == exports_.end()) return false;
  if (unchanged(found->second, found->second.base(), found->second.end())) return true;
  exports_.erase(found);
  return false;
}

std::vector<Descriptor> Exports::descriptors(uint64_t export_id, size_t first, size_t count) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = find(export_id);
  if (found == exports_.end() || first + count > found->second.chunks.size()) {
    throw CannotShare("memory that was freed while it was shared");
  }
  std::vector<Descriptor> descriptors;
  for (size_t i = first; i < first + count; ++i) {
    const Chunk& chunk = found->second.chunks[i];
    driver::MemoryHandle handle = 0;
    library_.must(library_.retain_allocation, &handle, reinterpret_cast<void*>(chunk.base));
    int descriptor = -1;
    const int result = library_.export_allocation(&descriptor, handle, driver::kPosixDescriptor, 0);
    // Asked after retaining: had the chunk been replaced, the handle would be another's.
    const bool same = ids_at(chunk.base) == chunk.ids;
    library_.release_allocation(handle);
    if (result == driver::kSuccess) descriptors.emplace_back(descriptor, chunk.bytes);
    if (!same) {
      exports_.erase(found);
      throw CannotShare("memory that was freed while it was shared");
    }
    if (result != driver::kSuccess) {
      throw CannotShare(library_.explain(library_.export_allocation.name, result));
    }
  }
  return descriptors;
}

Exports::Ids Exports::ids_at(Address address) const {
  Ids ids;
  PointerAttribute names[] = {driver::kBufferId, driver::kMemoryBlockId};
  void* values[] = {&ids.buffer, &ids.block};
  library_.must(library_.pointer_attributes, static_cast<unsigned>(id_attributes_), names, values,
                address);
  return ids;
}

// Whether the part of an export under [first, end) is still the memory that was exported.
bool Exports::unchanged(const Export& found, Address first, Address end) const {
  for (const Chunk& chunk : found.chunks) {
    if (chunk.base + chunk.bytes <= first) continue;
    if (chunk.base >= end) break;
    if (ids_at(chunk.base) != chunk.ids) return false;
  }
  return true;
}

Exports::Export Exports::examine(Address first, Address end) const {
  Export made;
  for (Address at = first; at < end;) {
    const Attributes found = attributes_of(library_, at);
    if (at > first && found.memory_type == 0) {
      throw CannotShare("a tensor that reaches past its allocation");
    }
    if (found.memory_type != driver::kDeviceMemory) {
      throw CannotShare("memory that is not the device's");
    }
    if (found.managed != 0) throw CannotShare("managed memory");
    if (found.device != device_) {
      throw CannotShare("memory of device " + std::to_string(found.device) + " on device " +
                        std::to_string(device_));
    }
    if (found.pool != nullptr) throw CannotShare("memory of a stream-ordered pool");

    Chunk chunk{found.base, found.bytes, ids_at(found.base)};
    if (found.ipc_capable != 0) {
      if (at > first || chunk.base + chunk.bytes < end) {
        throw CannotShare("a tensor that reaches past its allocation");
      }
      library_.must(library_.get_ipc_handle, &made.handle, chunk.base);
    } else if ((found.handle_types & driver::kPosixDescriptor) != 0) {
      // Of memory mapped piece by piece this gives the piece.
      library_.must(library_.address_range, &chunk.base, &chunk.bytes, at);
      chunk.ids = ids_at(chunk.base);
      made.by_descriptor = true;
    } else {
      throw CannotShare("memory that was allocated without a handle to share it by");
    }
    at = chunk.base + chunk.bytes;
    made.chunks.push_back(chunk);
  }
  return made;
}

Exports::ByBase::iterator Exports::find(uint64_t export_id) {
  return std::find_if(exports_.begin(), exports_.end(),
                      [&](const auto& entry) { return entry.second.id == export_id; });
}

}  // namespace pg_sdma
