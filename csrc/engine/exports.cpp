#include "engine/exports.h"

#include <algorithm>
#include <string>
#include <utility>

#include "engine/driver_manners.h"

namespace pg_sdma {

using driver::Allocation;
using driver::Failure;
using driver::PointerAttribute;

namespace {

constexpr const char* kFreed = "memory that was freed while it was shared";

}  // namespace

Exports::Exports(const driver::Library& library, int device)
    : library_(library), device_(device), id_attributes_(driver::count_id_attributes(library)) {}

Place Exports::publish(const void* data, size_t bytes) {
  const auto first = reinterpret_cast<Address>(data);
  const Address end = first + bytes;
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto next = by_base_.upper_bound(first); next != by_base_.begin();) {
    const auto at = std::prev(next);
    if (at->first + longest_ < end) break;
    const uint64_t id = at->second;
    Export& found = exports_.at(id);
    if (found.end() < end) {
      next = at;
      continue;
    }
    if (unchanged(found, first, end)) return {id, first - found.base()};
    bury(id, found);
    next = by_base_.upper_bound(first);
  }
  try {
    Export made = examine(first, end);
    const Place place{++last_id_, first - made.base()};
    longest_ = std::max<size_t>(longest_, made.end() - made.base());
    by_base_.emplace(made.base(), place.export_id);
    exports_.emplace(place.export_id, std::move(made));
    return place;
  } catch (const Failure& failure) {
    throw CannotShare(failure.what());
  }
}

Ticket Exports::ticket(uint64_t export_id) {
  std::lock_guard<std::mutex> lock(mutex_);
  Export& shared = find(export_id);
  if (shared.dead) throw CannotShare(kFreed);
  ++shared.tickets;
  Ticket ticket;
  ticket.export_id = export_id;
  ticket.bytes = shared.end() - shared.base();
  if (shared.by_descriptor) {
    ticket.descriptors = static_cast<uint32_t>(shared.pieces.size());
  } else {
    std::copy(shared.handle.bytes.begin(), shared.handle.bytes.end(), ticket.handle.begin());
  }
  return ticket;
}

void Exports::give_up(uint64_t export_id) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = exports_.find(export_id);
  if (found != exports_.end() && --found->second.tickets <= 0 && found->second.dead) {
    exports_.erase(found);
  }
}

bool Exports::live(uint64_t export_id) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = exports_.find(export_id);
  if (found == exports_.end() || found->second.dead) return false;
  Export& shared = found->second;
  if (unchanged(shared, shared.base(), shared.end())) return true;
  bury(export_id, shared);
  return false;
}

// A part of it may still be there, and in use.
void Exports::bury(uint64_t export_id, Export& dead) {
  const auto [first, last] = by_base_.equal_range(dead.base());
  by_base_.erase(std::find_if(first, last, [&](const auto& e) { return e.second == export_id; }));
  dead.dead = true;
  if (dead.tickets <= 0) exports_.erase(export_id);
}

std::vector<Chunk> Exports::chunks(uint64_t export_id, size_t first, size_t count,
                                   Segment& segment) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Export& shared = find(export_id);
  if (!shared.by_descriptor || first + count > shared.pieces.size()) throw CannotShare(kFreed);
  segment = shared.segment;
  std::vector<Chunk> chunks;
  for (size_t i = first; i < first + count; ++i) {
    const Piece& piece = shared.pieces[i];
    const bool there = ids_at(piece.base) == piece.ids;
    chunks.push_back({there ? piece.serial : 0, piece.base, piece.bytes});
  }
  return chunks;
}

std::vector<Descriptor> Exports::descriptors(uint64_t export_id,
                                             const std::vector<uint64_t>& serials) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Export& shared = find(export_id);
  std::vector<Descriptor> descriptors;
  for (const uint64_t serial : serials) {
    const auto piece = std::find_if(shared.pieces.begin(), shared.pieces.end(),
                                    [&](const Piece& each) { return each.serial == serial; });
    if (serial == 0 || piece == shared.pieces.end()) throw CannotShare(kFreed);
    driver::MemoryHandle handle = 0;
    library_.must(library_.retain_allocation, &handle, reinterpret_cast<void*>(piece->base));
    int descriptor = -1;
    const int result = library_.export_allocation(&descriptor, handle, driver::kPosixDescriptor, 0);
    // Asked after retaining: had the chunk been replaced, the handle would be another's.
    const bool same = ids_at(piece->base) == piece->ids;
    library_.release_allocation(handle);
    if (result == driver::kSuccess) descriptors.emplace_back(descriptor, piece->bytes);
    if (!same) throw CannotShare(kFreed);
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
  for (const Piece& piece : found.pieces) {
    if (piece.base + piece.bytes <= first) continue;
    if (piece.base >= end) break;
    if (ids_at(piece.base) != piece.ids) return false;
  }
  return true;
}

Exports::Export Exports::examine(Address first, Address end) {
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

    Piece piece{found.base, found.bytes, ids_at(found.base)};
    if (found.exported == Allocation::Export::kHandle) {
      if (at > first || piece.base + piece.bytes < end) {
        throw CannotShare("a tensor that reaches past its allocation");
      }
      library_.must(library_.get_ipc_handle, &made.handle, piece.base);
    } else if (found.exported == Allocation::Export::kDescriptors) {
      // Of memory mapped piece by piece this gives the piece.
      library_.must(library_.address_range, &piece.base, &piece.bytes, at);
      piece.ids = ids_at(piece.base);
      piece.serial = serial_of(piece);
      made.by_descriptor = true;
      made.segment = {found.base, found.bytes};
    } else {
      throw CannotShare("memory that was allocated without a handle to share it by");
    }
    at = piece.base + piece.bytes;
    made.pieces.push_back(piece);
  }
  // Of all addresses that were reserved together, as drivers say today; at least of its own.
  const Address segment_end = made.segment.base + made.segment.bytes;
  if (made.base() < made.segment.base || made.end() > segment_end) {
    made.segment = {made.base(), made.end() - made.base()};
  }
  return made;
}

uint64_t Exports::serial_of(const Piece& chunk) {
  Piece& known = chunks_[chunk.base];
  if (known.serial == 0 || known.bytes != chunk.bytes || known.ids != chunk.ids) {
    known = chunk;
    known.serial = ++last_serial_;
  }
  return known.serial;
}

Exports::Export& Exports::find(uint64_t export_id) {
  const auto found = exports_.find(export_id);
  if (found == exports_.end()) throw CannotShare(kFreed);
  return found->second;
}

}  // namespace pg_sdma
