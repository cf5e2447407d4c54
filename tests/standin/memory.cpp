// Device memory: memfds that are mapped here, and by peers.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "state.h"

namespace standin {
namespace {

constexpr size_t kGranularity = size_t{1} << 16;  // of chunks; a real device's is 2 MiB

// What backs an allocation.
struct Physical {
  int file = -1;
  size_t bytes = 0;
  int device = 0;
  bool exportable = false;  // by descriptor
  uint64_t id = 0;
  std::string name;  // the same in every process that has it

  ~Physical() { close(file); }
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

struct Registration {
  size_t bytes = 0;
  Address device = 0;  // where "the device" sees it: another address, so that mixing them up shows
};

// What an IPC handle holds.
struct IpcContents {
  int process;
  int file;
  int device;
  size_t bytes;
  char name[32];
};
static_assert(sizeof(IpcContents) <= sizeof(IpcHandle));

std::mutex mutex;
std::map<Address, Region> regions;
std::map<Address, size_t> reservations;
std::map<MemoryHandle, Handle> handles;
std::map<Address, Registration> registrations;  // by host address

std::string file_name(int file) {
  char link[128] = {};
  const std::string path = "/proc/self/fd/" + std::to_string(file);
  if (readlink(path.c_str(), link, sizeof link - 1) < 0) return "";
  const std::string name(link);  // "/memfd:<name> (deleted)"
  const size_t start = name.find(':');
  return start == std::string::npos ? "" : name.substr(start + 1, name.find(' ') - start - 1);
}

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

int allocate(Address* address, size_t bytes, Region::Kind kind) {
  if (bytes == 0) return kInvalidValue;
  std::lock_guard<std::mutex> lock(mutex);
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
      // Of a chunk: its reservation's, as the engine may not rely on either.
      Address start = known ? found->first : 0;
      size_t bytes = known ? found->second.bytes : 0;
      if (chunk) std::tie(start, bytes) = *std::prev(reservations.upper_bound(address));
      return name == kRangeStart ? put(start) : put(bytes);
    }
  }
}

}  // namespace

bool accessible(Address address, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  const Address end = address + bytes;
  while (address < end) {
    const auto found = region_at(address);
    if (found == regions.end() || !found->second.access) return false;
    address = found->first + found->second.bytes;
  }
  return true;
}

bool registered(Address address) {
  std::lock_guard<std::mutex> lock(mutex);
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
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = regions.find(address);
  if (found == regions.end() || found->second.kind > Region::Kind::kManaged) return kInvalidValue;
  forget(found);
  return kSuccess;
}

int cuPointerGetAttributes(unsigned count, PointerAttribute* attributes, void** values,
                           Address address) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  std::lock_guard<std::mutex> lock(mutex);
  for (unsigned i = 0; i < count; ++i) {
    if (attributes[i] == kMemoryBlockId && !settings().block_ids) return kInvalidValue;
    put_attribute(attributes[i], values[i], address);
  }
  return kSuccess;
}

int cuMemGetAddressRange_v2(Address* base, size_t* bytes, Address address) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = region_at(address);
  if (found == regions.end()) return kInvalidValue;
  *base = found->first;
  *bytes = found->second.bytes;
  return kSuccess;
}

int cuIpcGetMemHandle(IpcHandle* handle, Address base) {
  if (const int code = enter(__func__, Needs::kContextAndNoCapture)) return code;
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = regions.find(base);
  if (found == regions.end() || found->second.kind != Region::Kind::kAllocation) {
    return kInvalidValue;
  }
  const Physical& physical = *found->second.physical;
  IpcContents contents{getpid(), physical.file, physical.device, physical.bytes, {}};
  physical.name.copy(contents.name, sizeof contents.name - 1);
  std::memcpy(handle->bytes.data(), &contents, sizeof contents);
  return kSuccess;
}

int cuIpcOpenMemHandle_v2(Address* base, IpcHandle handle, unsigned flags) {
  if (const int code = enter(__func__, Needs::kContextAndNoCapture)) return code;
  if (flags != kLazyPeerAccess) return kInvalidValue;
  IpcContents contents;
  std::memcpy(&contents, handle.bytes.data(), sizeof contents);
  if (contents.process == getpid()) return kInvalidContext;
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& [known, region] : regions) {
    if (region.kind != Region::Kind::kImport || region.physical->name != contents.name) continue;
    ++region.users;
    *base = known;
    return kSuccess;
  }
  const std::string path =
      "/proc/" + std::to_string(contents.process) + "/fd/" + std::to_string(contents.file);
  auto physical = std::make_shared<Physical>();
  physical->file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (physical->file < 0 || file_name(physical->file) != contents.name) return kMapFailed;
  physical->name = contents.name;
  physical->bytes = contents.bytes;
  physical->device = contents.device;
  physical->id = next_id();
  *base = map_at(0, *physical, contents.bytes);
  regions.emplace(*base,
                  Region{Region::Kind::kImport, contents.bytes, std::move(physical), next_id()});
  return kSuccess;
}

int cuIpcCloseMemHandle(Address base) {
  if (const int code = enter(__func__, Needs::kContextAndNoCapture)) return code;
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = regions.find(base);
  if (found == regions.end() || found->second.kind != Region::Kind::kImport) return kInvalidValue;
  if (--found->second.users == 0) forget(found);
  return kSuccess;
}

int cuMemGetAllocationGranularity(size_t* bytes, const AllocationProperties*, int) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  *bytes = kGranularity;
  return kSuccess;
}

int cuMemCreate(MemoryHandle* handle, size_t bytes, const AllocationProperties* properties,
                unsigned long long flags) {
  if (const int code = enter(__func__, Needs::kContextAndNoCapture)) return code;
  if (flags != 0 || bytes == 0 || bytes % kGranularity != 0 || properties->type != kPinned ||
      properties->location.type != kOnDevice) {
    return kInvalidValue;
  }
  std::lock_guard<std::mutex> lock(mutex);
  const bool exportable = properties->handle_types == kPosixDescriptor;
  *handle = next_id();
  handles[*handle] = {create(bytes, properties->location.id, exportable)};
  return kSuccess;
}

int cuMemRetainAllocationHandle(MemoryHandle* handle, void* address) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = region_at(reinterpret_cast<Address>(address));
  if (found == regions.end() || found->second.kind != Region::Kind::kChunk) return kInvalidValue;
  *handle = next_id();
  handles[*handle] = {found->second.physical};
  return kSuccess;
}

int cuMemRelease(MemoryHandle handle) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  std::lock_guard<std::mutex> lock(mutex);
  if (handles.erase(handle) == 0) return kInvalidValue;
  return kSuccess;
}

int cuMemExportToShareableHandle(void* out, MemoryHandle handle, HandleType type,
                                 unsigned long long flags) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = handles.find(handle);
  if (found == handles.end() || type != kPosixDescriptor || flags != 0) return kInvalidValue;
  if (!found->second.physical->exportable) return kNotPermitted;
  const int descriptor = fcntl(found->second.physical->file, F_DUPFD_CLOEXEC, 0);
  std::memcpy(out, &descriptor, sizeof descriptor);
  return kSuccess;
}

int cuMemImportFromShareableHandle(MemoryHandle* handle, void* shareable, HandleType type) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  if (type != kPosixDescriptor) return kInvalidValue;
  const int descriptor = static_cast<int>(reinterpret_cast<intptr_t>(shareable));
  const std::string name = file_name(descriptor);
  struct stat status {};
  if (name.rfind("gpu", 0) != 0 || fstat(descriptor, &status) != 0) return kHandleInvalid;
  std::lock_guard<std::mutex> lock(mutex);
  auto physical = std::make_shared<Physical>();
  physical->file = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  physical->bytes = static_cast<size_t>(status.st_size);
  physical->device = name[3] - '0';
  physical->name = name;
  physical->id = next_id();
  *handle = next_id();
  handles[*handle] = {std::move(physical)};
  return kSuccess;
}

int cuMemAddressReserve(Address* base, size_t bytes, size_t alignment, Address hint,
                        unsigned long long flags) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  if (bytes == 0 || bytes % kGranularity != 0 || alignment != 0 || hint != 0 || flags != 0) {
    return kInvalidValue;
  }
  std::lock_guard<std::mutex> lock(mutex);
  void* at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) die("reserving addresses");
  *base = reinterpret_cast<Address>(at);
  reservations[*base] = bytes;
  return kSuccess;
}

int cuMemAddressFree(Address base, size_t bytes) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = reservations.find(base);
  if (found == reservations.end() || found->second != bytes) return kInvalidValue;
  const auto inside = regions.lower_bound(base);
  if (inside != regions.end() && inside->first < base + bytes) return kInvalidValue;
  munmap(reinterpret_cast<void*>(base), bytes);
  reservations.erase(found);
  return kSuccess;
}

int cuMemMap(Address address, size_t bytes, size_t offset, MemoryHandle handle,
             unsigned long long flags) {
  if (const int code = enter(__func__, Needs::kContextAndNoCapture)) return code;
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = handles.find(handle);
  if (found == handles.end() || found->second.physical->bytes != bytes) return kInvalidValue;
  if (offset != 0 || flags != 0 || region_at(address) != regions.end()) return kInvalidValue;
  const auto next = reservations.upper_bound(address);
  if (next == reservations.begin()) return kInvalidValue;
  const auto& [base, reserved] = *std::prev(next);
  if (address + bytes > base + reserved) return kInvalidValue;
  map_at(address, *found->second.physical, bytes);
  // Where ids of physical memory exist, the buffer id may not be what tells chunks apart.
  const uint64_t buffer_id = settings().block_ids ? base : next_id();
  regions.emplace(address, Region{Region::Kind::kChunk, bytes, found->second.physical, buffer_id,
                                  /*access=*/false});
  return kSuccess;
}

int cuMemUnmap(Address address, size_t bytes) {
  if (const int code = enter(__func__, Needs::kContextAndNoCapture)) return code;
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = regions.find(address);
  if (found == regions.end() || found->second.bytes != bytes) return kInvalidValue;
  if (found->second.kind != Region::Kind::kChunk) return kInvalidValue;
  forget(found);
  return kSuccess;
}

int cuMemSetAccess(Address address, size_t bytes, const AccessDescription* access, size_t count) {
  if (const int code = enter(__func__, Needs::kContextAndNoCapture)) return code;
  if (count != 1 || access->location.type != kOnDevice || access->flags != kReadWrite) {
    return kInvalidValue;
  }
  std::lock_guard<std::mutex> lock(mutex);
  for (Address at = address; at < address + bytes;) {
    const auto found = regions.find(at);
    if (found == regions.end() || found->second.kind != Region::Kind::kChunk) return kInvalidValue;
    found->second.access = access->location.id == current_device();
    at += found->second.bytes;
  }
  return kSuccess;
}

int cuMemHostRegister_v2(void* data, size_t bytes, unsigned flags) {
  if (const int code = enter(__func__, Needs::kContextAndNoCapture)) return code;
  if (flags != (kPortable | kDeviceMapped) || bytes == 0) return kInvalidValue;
  std::lock_guard<std::mutex> lock(mutex);
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
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = registrations.find(reinterpret_cast<Address>(data));
  if (found == registrations.end() || flags != 0) return kInvalidValue;
  *address = found->second.device;
  return kSuccess;
}

int cuMemHostUnregister(void* data) {
  if (const int code = enter(__func__, Needs::kContextAndNoCapture)) return code;
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = registrations.find(reinterpret_cast<Address>(data));
  if (found == registrations.end()) return kNotRegistered;
  const auto [bytes, device] = found->second;
  if (in_use(device, bytes)) die("host memory is unregistered while an operation uses it");
  munmap(reinterpret_cast<void*>(device), bytes);
  registrations.erase(found);
  return kSuccess;
}

size_t standin_allocated() {
  std::lock_guard<std::mutex> lock(mutex);
  size_t bytes = 0;
  for (const auto& [base, region] : regions) {
    if (region.kind == Region::Kind::kAllocation) bytes += region.bytes;
  }
  return bytes;
}

size_t standin_mapped() {
  std::lock_guard<std::mutex> lock(mutex);
  const std::string own = ":" + std::to_string(getpid()) + ":";
  size_t bytes = 0;
  for (const auto& [base, region] : regions) {
    if (region.physical->name.find(own) == std::string::npos) bytes += region.bytes;
  }
  return bytes;
}
}
