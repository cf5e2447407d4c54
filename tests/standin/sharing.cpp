// Device memory between processes: IPC handles, and physical chunks by descriptors.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "memory.h"

namespace standin {
namespace {

constexpr size_t kGranularity = size_t{1} << 16;  // of chunks; a real device's is 2 MiB

// What an IPC handle holds.
struct IpcContents {
  int process;
  int file;
  int device;
  size_t bytes;
  char name[32];
};
static_assert(sizeof(IpcContents) <= sizeof(IpcHandle));

std::string file_name(int file) {
  char link[128] = {};
  const std::string path = "/proc/self/fd/" + std::to_string(file);
  if (readlink(path.c_str(), link, sizeof link - 1) < 0) return "";
  const std::string name(link);  // "/memfd:<name> (deleted)"
  const size_t start = name.find(':');
  return start == std::string::npos ? "" : name.substr(start + 1, name.find(' ') - start - 1);
}

}  // namespace
}  // namespace standin

using namespace standin;

extern "C" {

int cuIpcGetMemHandle(IpcHandle* handle, Address base) {
  if (const int code = enter(__func__, Needs::kContextAndNoCapture)) return code;
  std::lock_guard<std::mutex> lock(memory_mutex);
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
  std::lock_guard<std::mutex> lock(memory_mutex);
  // What was closed since is still there, and its address may be another's.
  static std::map<std::string, Address> opened;
  Address& place = opened[contents.name];
  const auto known = regions.find(place);
  if (known != regions.end() && known->second.kind == Region::Kind::kImport &&
      known->second.physical->name == contents.name) {
    ++known->second.users;
    *base = place;
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
  *base = place = map_at(0, *physical, contents.bytes);
  // What is mapped needs it no more, and a process may have but so many.
  close(std::exchange(physical->file, -1));
  regions.emplace(*base,
                  Region{Region::Kind::kImport, contents.bytes, std::move(physical), next_id()});
  return kSuccess;
}

int cuIpcCloseMemHandle(Address base) {
  if (const int code = enter(__func__, Needs::kContextAndNoCapture)) return code;
  std::lock_guard<std::mutex> lock(memory_mutex);
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
  std::lock_guard<std::mutex> lock(memory_mutex);
  const bool exportable = properties->handle_types == kPosixDescriptor;
  *handle = next_id();
  handles[*handle] = {create(bytes, properties->location.id, exportable)};
  return kSuccess;
}

int cuMemRetainAllocationHandle(MemoryHandle* handle, void* address) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  std::lock_guard<std::mutex> lock(memory_mutex);
  const auto found = region_at(reinterpret_cast<Address>(address));
  if (found == regions.end() || found->second.kind != Region::Kind::kChunk) return kInvalidValue;
  *handle = next_id();
  handles[*handle] = {found->second.physical};
  return kSuccess;
}

int cuMemRelease(MemoryHandle handle) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  std::lock_guard<std::mutex> lock(memory_mutex);
  if (handles.erase(handle) == 0) return kInvalidValue;
  return kSuccess;
}

int cuMemExportToShareableHandle(void* out, MemoryHandle handle, HandleType type,
                                 unsigned long long flags) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  std::lock_guard<std::mutex> lock(memory_mutex);
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
  struct stat status{};
  if (name.rfind("gpu", 0) != 0 || fstat(descriptor, &status) != 0) return kHandleInvalid;
  std::lock_guard<std::mutex> lock(memory_mutex);
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
  std::lock_guard<std::mutex> lock(memory_mutex);
  void* at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) die("reserving addresses");
  *base = reinterpret_cast<Address>(at);
  reservations[*base] = bytes;
  return kSuccess;
}

int cuMemAddressFree(Address base, size_t bytes) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  std::lock_guard<std::mutex> lock(memory_mutex);
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
  std::lock_guard<std::mutex> lock(memory_mutex);
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
  std::lock_guard<std::mutex> lock(memory_mutex);
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
  std::lock_guard<std::mutex> lock(memory_mutex);
  for (Address at = address; at < address + bytes;) {
    const auto found = regions.find(at);
    if (found == regions.end() || found->second.kind != Region::Kind::kChunk) return kInvalidValue;
    found->second.access = access->location.id == current_device();
    at += found->second.bytes;
  }
  return kSuccess;
}
}
