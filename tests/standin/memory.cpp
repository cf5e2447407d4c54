// Device memory: memfds that are mapped here, and by peers. Host memory registered for the device.
#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <tuple>

namespace standin {

std::mutex memory_mutex;
std::map<Address, Region> regions;
std::map<Address, size_t> reservations;
std::map<MemoryHandle, Handle> handles;

namespace {

struct Registration {
  size_t bytes = 0;
  Address device = 0;  // where "the device" sees it: another address, so that mixing them up shows
};

std::map<Address, Registration> registrations;  // by host address

int allocate(Address* address, size_t bytes, Region::Kind kind) {
  if (bytes == 0) return kInvalidValue;
  std::lock_guard<std::mutex> lock(memory_mutex);
  Region region{kind, bytes, create(bytes, current_device(), false), next_id()};
  *address = map_at(0, *region.physical, bytes);
  regions.emplace(*address, std::move(region));
  return kSuccess;
}

void put_attribute(PointerAttribute name, void* value, Address address) {
  const auto found = region_at(address);
  const bool known = found != regions.end();
  const auto put = [value](auto of_type) { std::memcpy(value, &of_type, sizeof of_type); };
  const bool chunk = known && found->second.kind == Region::Kind::kChunk;
  switch (name) {
    case kMemoryType:
      return put(known ? unsigned{kDeviceMemory} : 0u);
    case kBufferId:
      return put(known ? found->second.buffer_id : uint64_t{0});
    case kMemoryBlockId:
      return put(known ? found->second.physical->id : uint64_t{0});
    case kIsManaged:
      return put(unsigned{known && found->second.kind == Region::Kind::kManaged});
    case kDeviceOrdinal:
      return put(known ? found->second.physical->device : 0);
    case kIpcCapable:
      return put(unsigned{known && found->second.kind == Region::Kind::kAllocation});
    case kAllowedHandleTypes:
      return put(uint64_t{chunk && found->second.physical->exportable});
    case kMemoryPool:
      return put(static_cast<void*>(nullptr));
    case kRangeStart:
    case kRangeSize: {
      // Of a chunk: its reservation's.
      Address start = known ? found->first : 0;
      size_t bytes = known ? found->second.bytes : 0;
      if (chunk) std::tie(start, bytes) = *std::prev(reservations.upper_bound(address));
      return name == kRangeStart ? put(start) : put(bytes);
    }
  }
}

}  // namespace

Physical::~Physical() { close(file); }

PhysicalPtr create(size_t bytes, int device, bool exportable) {
  auto physical = std::make_shared<Physical>();
  physical->id = next_id();
  physical->name = "gpu" + std::to_string(device) + ":" + std::to_string(getpid()) + ":" +
                   std::to_string(physical->id);
  physical->file = memfd_create(physical->name.c_str(), MFD_CLOEXEC);
  if (physical->file < 0 || ftruncate(physical->file, static_cast<off_t>(bytes)) != 0) {
    die("no memory file of " + std::to_string(bytes) + " bytes");
  }
  physical->bytes = bytes;
  physical->device = device;
  physical->exportable = exportable;
  return physical;
}

Address map_at(Address fixed, const Physical& physical, size_t bytes) {
  void* at = mmap(reinterpret_cast<void*>(fixed), bytes, PROT_READ | PROT_WRITE,
                  MAP_SHARED | (fixed != 0 ? MAP_FIXED : 0), physical.file, 0);
  if (at == MAP_FAILED) die("mmap of device memory");
  return reinterpret_cast<Address>(at);
}

void forget(std::map<Address, Region>::iterator region) {
  const auto [base, found] = *region;
  if (in_use(base, found.bytes)) die("memory is given back while an operation uses it");
  if (found.kind == Region::Kind::kChunk) {
    // The addresses stay reserved.
    mmap(reinterpret_cast<void*>(base), found.bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  } else {
    munmap(reinterpret_cast<void*>(base), found.bytes);
  }
  regions.erase(region);
}

std::map<Address, Region>::iterator region_at(Address address) {
  auto next = regions.upper_bound(address);
  if (next == regions.begin()) return regions.end();
  const auto found = std::prev(next);
  return address < found->first + found->second.bytes ? found : regions.end();
}

bool accessible(Address address, size_t bytes) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  const Address end = address + bytes;
  while (address < end) {
    const auto found = region_at(address);
    if (found == regions.end() || !found->second.access) return false;
    address = found->first + found->second.bytes;
  }
  return true;
}

bool imported(Address address) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  const auto found = region_at(address);
  return found != regions.end() && found->second.kind == Region::Kind::kImport;
}

bool registered(Address address) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  for (const auto& [host, registration] : registrations) {
    if (address >= registration.device && address + 8 <= registration.device + registration.bytes) {
      return address % 8 == 0;
    }
  }
  return false;
}

}  // namespace standin

using namespace standin;

extern "C" {

int cuMemAlloc_v2(Address* address, size_t bytes) {
  if (const int code = enter(__func__, Needs::kContextAndNoCapture)) return code;
  return allocate(address, bytes, Region::Kind::kAllocation);
}

int cuMemAllocManaged(Address* address, size_t bytes, unsigned) {
  if (const int code = enter(__func__, Needs::kContextAndNoCapture)) return code;
  return allocate(address, bytes, Region::Kind::kManaged);
}

int cuMemFree_v2(Address address) {
  if (const int code = enter(__func__, Needs::kContextAndNoCapture)) return code;
  drain();
  std::lock_guard<std::mutex> lock(memory_mutex);
  const auto found = regions.find(address);
  if (found == regions.end() || found->second.kind > Region::Kind::kManaged) return kInvalidValue;
  forget(found);
  return kSuccess;
}

int cuPointerGetAttributes(unsigned count, PointerAttribute* attributes, void** values,
                           Address address) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  std::lock_guard<std::mutex> lock(memory_mutex);
  for (unsigned i = 0; i < count; ++i) {
    if (attributes[i] == kMemoryBlockId && !settings().block_ids) return kInvalidValue;
    put_attribute(attributes[i], values[i], address);
  }
  return kSuccess;
}

int cuMemGetAddressRange_v2(Address* base, size_t* bytes, Address address) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  std::lock_guard<std::mutex> lock(memory_mutex);
  const auto found = region_at(address);
  if (found == regions.end()) return kInvalidValue;
  *base = found->first;
  *bytes = found->second.bytes;
  return kSuccess;
}

int cuMemHostRegister_v2(void* data, size_t bytes, unsigned flags) {
  if (const int code = enter(__func__, Needs::kContextAndNoCapture)) return code;
  if (flags != (kPortable | kDeviceMapped) || bytes == 0) return kInvalidValue;
  std::lock_guard<std::mutex> lock(memory_mutex);
  const auto host = reinterpret_cast<Address>(data);
  const auto next = registrations.lower_bound(host);
  if (next != registrations.end() && next->first < host + bytes) return kAlreadyRegistered;
  if (next != registrations.begin()) {
    const auto& [before, registration] = *std::prev(next);
    if (before + registration.bytes > host) return kAlreadyRegistered;
  }
  void* alias = mremap(data, 0, bytes, MREMAP_MAYMOVE);
  if (alias == MAP_FAILED) die("registered memory has to be shared memory, from a page's start");
  registrations[host] = {bytes, reinterpret_cast<Address>(alias)};
  return kSuccess;
}

int cuMemHostGetDevicePointer_v2(Address* address, void* data, unsigned flags) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  std::lock_guard<std::mutex> lock(memory_mutex);
  const auto found = registrations.find(reinterpret_cast<Address>(data));
  if (found == registrations.end() || flags != 0) return kInvalidValue;
  *address = found->second.device;
  return kSuccess;
}

int cuMemHostUnregister(void* data) {
  if (const int code = enter(__func__, Needs::kContextAndNoCapture)) return code;
  std::lock_guard<std::mutex> lock(memory_mutex);
  const auto found = registrations.find(reinterpret_cast<Address>(data));
  if (found == registrations.end()) return kNotRegistered;
  const auto [bytes, device] = found->second;
  if (in_use(device, bytes)) die("host memory is unregistered while an operation uses it");
  munmap(reinterpret_cast<void*>(device), bytes);
  registrations.erase(found);
  return kSuccess;
}

size_t standin_allocated() {
  std::lock_guard<std::mutex> lock(memory_mutex);
  size_t bytes = 0;
  for (const auto& [base, region] : regions) {
    if (region.kind == Region::Kind::kAllocation) bytes += region.bytes;
  }
  return bytes;
}

size_t standin_handles() {
  std::lock_guard<std::mutex> lock(memory_mutex);
  return handles.size();
}

size_t standin_mapped() {
  std::lock_guard<std::mutex> lock(memory_mutex);
  const std::string own = ":" + std::to_string(getpid()) + ":";
  size_t bytes = 0;
  for (const auto& [base, region] : regions) {
    if (region.physical->name.find(own) == std::string::npos) bytes += region.bytes;
  }
  return bytes;
}
}
