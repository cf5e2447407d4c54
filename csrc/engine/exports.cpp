#include "engine/exports.h"

#include <algorithm>
#include <string>
#include <utility>

#include "engine/driver_manners.h"

namespace pg_sdma {

using driver::Allocation;
using driver::Failure;
using driver::PointerAttribute;

Exports::Exports(const driver::Library& library, int device)
    : library_(library), device_(device), id_attributes_(driver::count_id_attributes(library)) {}

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
    const Allocation found = driver::allocation_at(library_, device_, at);
    if (at > first && !found.known) throw CannotShare("a tensor that reaches past its allocation");
    if (!found.on_device) throw CannotShare("memory that is not the device's");
    if (found.managed) throw CannotShare("managed memory");
    if (found.device != device_) {
      throw CannotShare("memory of device " + std::to_string(found.device) + " on device " +
                        std::to_string(device_));
    }
    if (found.pool != nullptr) throw CannotShare("memory of a stream-ordered pool");

    Chunk chunk{found.base, found.bytes, ids_at(found.base)};
    if (found.exported == Allocation::Export::kHandle) {
      if (at > first || chunk.base + chunk.bytes < end) {
        throw CannotShare("a tensor that reaches past its allocation");
      }
      library_.must(library_.get_ipc_handle, &made.handle, chunk.base);
    } else if (found.exported == Allocation::Export::kDescriptors) {
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
