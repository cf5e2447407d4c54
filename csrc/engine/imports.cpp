#include "engine/imports.h"

#include <algorithm>
#include <stdexcept>

namespace pg_sdma {
namespace {

class Unlocked {
 public:
  explicit Unlocked(std::unique_lock<std::mutex>& lock) : lock_(lock) { lock_.unlock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked() { lock_.lock(); }

 private:
  std::unique_lock<std::mutex>& lock_;
};

}  // namespace

Mapping Imports::open(const Owner& owner, const Ticket& ticket) {
  const Key key{owner.socket, ticket.export_id};
  std::unique_lock<std::mutex> lock(mutex_);
  if (const auto known = numbers_.find(key); known != numbers_.end()) return again(known->second);
  Import import{key, 0, ticket.bytes, 1, ticket.descriptors > 0, {}, {}};
  try {
    if (import.by_descriptor) {
      map_chunks(owner, ticket, import, lock);
    } else {
      driver::IpcHandle handle;
      std::copy(ticket.handle.begin(), ticket.handle.end(), handle.bytes.begin());
      library_.must(library_.open_ipc_handle, &import.base, handle, driver::kLazyPeerAccess);
    }
  } catch (const std::runtime_error& error) {
    throw CannotShare("memory of process " + std::to_string(owner.process) +
                      " cannot be opened on device " + std::to_string(device_) + ": " +
                      error.what());
  }
  // Another thread may have opened it while this one waited for the owner.
  if (const auto known = numbers_.find(key); known != numbers_.end()) {
    give_back(windows_.find(import.window), import.chunks);
    return again(known->second);
  }
  const Mapping mapping{0, static_cast<uintptr_t>(import.base), import.bytes, ++last_number_};
  numbers_.emplace(key, last_number_);
  imports_.emplace(last_number_, std::move(import));
  return mapping;
}

Mapping Imports::again(uint64_t number) {
  Import& import = imports_.at(number);
  ++import.users;
  return {0, static_cast<uintptr_t>(import.base), import.bytes, number};
}

void Imports::close(const Mapping& mapping) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = imports_.find(mapping.number);
  if (found == imports_.end() || --found->second.users > 0) return;
  const Import import = std::move(found->second);
  imports_.erase(found);
  numbers_.erase(import.key);
  if (import.by_descriptor) {
    give_back(windows_.find(import.window), import.chunks);
  } else {
    // A driver that refuses has been shut down, and the mapping with it.
    library_.close_ipc_handle(import.base);
  }
}

bool Imports::in_chunks(const Mapping& mapping) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = imports_.find(mapping.number);
  return found != imports_.end() && found->second.by_descriptor;
}

void Imports::map_chunks(const Owner& owner, const Ticket& ticket, Import& into, Lock& lock) {
  lock.unlock();
  DescriptorClient client(owner.socket, owner.process);
  Segment segment;
  std::vector<Chunk> chunks = client.chunks(ticket.export_id, ticket.descriptors, segment);
  const uint64_t first = chunks.front().address;
  uint64_t next = first;
  for (const Chunk& chunk : chunks) {
    if (chunk.address != next) throw std::runtime_error("chunks that do not adjoin");
    next += chunk.bytes;
  }
  if (next - first != ticket.bytes)
    throw std::runtime_error("chunks that do not fill their export");
  if (first < segment.base || next - segment.base > segment.bytes) {
    throw std::runtime_error("chunks that lie outside of their segment");
  }
  // What is gone is left out: an operation that peers still carry uses another part.
  chunks.erase(std::remove_if(chunks.begin(), chunks.end(),
                              [](const Chunk& chunk) { return chunk.serial == 0; }),
               chunks.end());
  if (chunks.empty()) throw std::runtime_error("memory that was freed while it was shared");
  lock.lock();
  const auto window = window_for(owner, ticket.export_id, segment, chunks);
  // Used from here on, so that nobody unmaps what this has yet to fetch or finds mapped.
  for (const Chunk& chunk : chunks) {
    Mapped& mapped = window->second.chunks[chunk.address];
    mapped.serial = chunk.serial;
    mapped.bytes = chunk.bytes;
    ++mapped.users;
  }
  try {
    map_missing(client, window->second, ticket.export_id, chunks, lock);
  } catch (...) {
    give_back(window, chunks);
    throw;
  }
  into.window = window->first;
  into.chunks = std::move(chunks);
  into.base = window->second.here(first);
}

Imports::Windows::iterator Imports::window_for(const Owner& owner, uint64_t export_id,
                                               const Segment& segment,
                                               const std::vector<Chunk>& chunks) {
  const auto get = [&](uint64_t alone) {
    const WindowKey key{owner.socket, segment.base, segment.bytes, alone};
    const auto known = windows_.find(key);
    if (known != windows_.end()) return known;
    Address base = 0;
    library_.must(library_.reserve_addresses, &base, segment.bytes, 0, 0, 0);
    return windows_.emplace(key, Window{segment, base, {}}).first;
  };
  const auto shared = get(0);
  const auto& mapped = shared->second.chunks;
  const bool fits = std::all_of(chunks.begin(), chunks.end(), [&](const Chunk& chunk) {
    const auto after = mapped.lower_bound(chunk.address + chunk.bytes);
    if (after == mapped.begin()) return true;
    const auto& [address, there] = *std::prev(after);
    return address + there.bytes <= chunk.address ||
           (address == chunk.address && there.serial == chunk.serial);
  });
  return fits ? shared : get(export_id);
}

void Imports::map_missing(DescriptorClient& client, Window& window, uint64_t export_id,
                          const std::vector<Chunk>& chunks, Lock& lock) {
  std::vector<Chunk> missing;
  std::vector<uint64_t> serials;
  for (const Chunk& chunk : chunks) {
    if (window.chunks.at(chunk.address).there) continue;
    missing.push_back(chunk);
    serials.push_back(chunk.serial);
  }
  auto chunk = missing.begin();
  const Unlocked meanwhile(lock);
  client.fetch(export_id, serials, [&](const Descriptor& descriptor) {
    if (descriptor.bytes() != chunk->bytes) throw std::runtime_error("a chunk of another size");
    const std::lock_guard<std::mutex> locked(mutex_);
    // Unless another thread that waited for it at the same time was faster.
    Mapped& mapped = window.chunks.at(chunk->address);
    if (!mapped.there) map(descriptor, window.here(chunk->address), mapped);
    ++chunk;
  });
}

void Imports::map(const Descriptor& descriptor, Address at, Mapped& chunk) {
  driver::MemoryHandle handle = 0;
  void* shareable = reinterpret_cast<void*>(static_cast<intptr_t>(descriptor.number()));
  library_.must(library_.import_allocation, &handle, shareable, driver::kPosixDescriptor);
  const int result = library_.map(at, chunk.bytes, 0, handle, 0);
  // The mapping holds the memory from here on.
  library_.release_allocation(handle);
  if (result != driver::kSuccess) {
    throw driver::Failure(result, library_.explain(library_.map.name, result));
  }
  const driver::AccessDescription access{{driver::kOnDevice, device_}, driver::kReadWrite};
  try {
    library_.must(library_.set_access, at, chunk.bytes, &access, 1);
  } catch (...) {
    library_.unmap(at, chunk.bytes);
    throw;
  }
  chunk.there = true;
}

void Imports::give_back(Windows::iterator window, const std::vector<Chunk>& chunks) {
  auto& mapped = window->second.chunks;
  for (const Chunk& chunk : chunks) {
    const auto found = mapped.find(chunk.address);
    if (--found->second.users > 0) continue;
    if (found->second.there) library_.unmap(window->second.here(chunk.address), chunk.bytes);
    mapped.erase(found);
  }
  if (!mapped.empty()) return;
  library_.free_addresses(window->second.base, window->second.segment.bytes);
  windows_.erase(window);
}

}  // namespace pg_sdma
