// HIP's names and manners over the same devices, memory and streams. Where HIP does as CUDA does,
// CUDA's function does it.
#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "memory.h"

namespace standin {
namespace {

std::mutex mutex;
std::set<std::pair<int, int>> reachable;  // (device, peer)

// As HIP's runtime writes it: with the width of its own type, and nothing where it has no answer.
void put_hip_attribute(PointerAttribute name, void* value, Address address) {
  const auto found = region_at(address);
  const bool known = found != regions.end();
  const auto put = [value](auto of_type) { std::memcpy(value, &of_type, sizeof of_type); };
  switch (name) {
    case kMemoryType:
      return put(known ? uint32_t{kDeviceMemory} : uint32_t{0});
    case kBufferId:
      return put(known ? static_cast<uint32_t>(found->second.buffer_id) : uint32_t{0});
    case kIsManaged:
      return put(static_cast<char>(known && found->second.kind == Region::Kind::kManaged));
    case kDeviceOrdinal:
      return put(known ? found->second.physical->device : -2);
    case kRangeStart:
      return put(known ? found->first : Address{0});
    case kRangeSize:
      return put(known ? static_cast<uint32_t>(found->second.bytes) : uint32_t{0});
    default:
      return;  // not supported, which the call does not tell
  }
}

}  // namespace

bool reaches(int device, int peer) {
  std::lock_guard<std::mutex> lock(mutex);
  return device == peer || reachable.count({device, peer}) == 1;
}

}  // namespace standin

using namespace standin;

extern "C" {

int hipInit(unsigned flags) {
  use_hip_manners();
  if (const int code = enter(__func__, Needs::kNothing)) return code;
  return cuInit(flags);
}

int hipDrvGetErrorString(int result, const char** text) { return cuGetErrorString(result, text); }

int hipGetDeviceCount(int* count) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  return cuDeviceGetCount(count);
}

int hipDeviceGetAttribute(int* value, int attribute, int device) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  if (attribute != kStreamWaitValue || device < 0 || device >= settings().devices) {
    return kInvalidValue;
  }
  *value = settings().has_64bit;
  return kSuccess;
}

int hipDeviceGetUuid(Uuid* uuid, int device) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  return cuDeviceGetUuid_v2(uuid, device);
}

int hipDeviceCanAccessPeer(int* can, int device, int peer) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  return cuDeviceCanAccessPeer(can, device, peer);
}

int hipExtGetLinkTypeAndHopCount(int device, int peer, uint32_t* type, uint32_t* hops) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  if (device == peer) return kInvalidValue;
  *type = settings().link == "pcie" ? kPcieLink : kXgmiLink;
  *hops = 1;
  return kSuccess;
}

int hipDeviceEnablePeerAccess(int peer, unsigned flags) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  if (flags != 0) return kInvalidValue;
  int can = 0;
  if (cuDeviceCanAccessPeer(&can, current_device(), peer) != kSuccess || can == 0) {
    return kInvalidDevice;
  }
  std::lock_guard<std::mutex> lock(mutex);
  const bool fresh = reachable.insert({current_device(), peer}).second;
  return fresh ? static_cast<int>(kSuccess) : static_cast<int>(kPeerAccessAlreadyEnabled);
}

int hipGetDevice(int* device) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  *device = current_device();
  return kSuccess;
}

int hipSetDevice(int device) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  return set_current_device(device);
}

int hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  *least = 1;
  *greatest = -1;
  return kSuccess;
}

int hipThreadExchangeStreamCaptureMode(CaptureMode* mode) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  return cuThreadExchangeStreamCaptureMode(mode);
}

int hipStreamCreateWithPriority(Stream* stream, unsigned flags, int priority) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  if (priority < -1 || priority > 1) return kInvalidValue;
  return cuStreamCreateWithPriority(stream, flags, std::min(priority, 0));
}

int hipStreamDestroy(Stream stream) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  return cuStreamDestroy_v2(stream);
}

int hipStreamIsCapturing(Stream stream, int* status) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  return cuStreamIsCapturing(stream, status);
}

int hipStreamWaitEvent(Stream stream, Event event, unsigned flags) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  return cuStreamWaitEvent(stream, event, flags);
}

int hipStreamWaitValue64(Stream stream, Address address, uint64_t value, unsigned flags,
                         uint64_t mask) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  if (!registered(address) || flags != kWaitAtLeast || mask != UINT64_MAX) return kInvalidValue;
  MemoryOperation operation;
  operation.operation = kWaitValue64;
  operation.address = address;
  operation.value = value;
  return enqueue_memory_operations(stream, 1, &operation);
}

int hipStreamWriteValue64(Stream stream, Address address, uint64_t value, unsigned flags) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  if (!registered(address) || flags != kWriteWithBarrier) return kInvalidValue;
  MemoryOperation operation;
  operation.operation = kWriteValue64;
  operation.address = address;
  operation.value = value;
  return enqueue_memory_operations(stream, 1, &operation);
}

// Interprocess events would stop the device when they are destroyed: not for this engine.
int hipEventCreateWithFlags(Event* event, unsigned flags) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  return cuEventCreate(event, flags);
}

int hipEventDestroy(Event event) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  return cuEventDestroy_v2(event);
}

int hipEventRecord(Event event, Stream stream) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  return cuEventRecord(event, stream);
}

int hipEventQuery(Event event) {
  if (const int code = enter(__func__, Needs::kContextAndNoCapture)) return code;
  return cuEventQuery(event);
}

// Only copies that no compute unit carries.
int hipMemcpyAsync(Address destination, Address source, size_t bytes, CopyKind kind,
                   Stream stream) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  if (kind != kNoComputeUnits) return kInvalidValue;
  {
    std::lock_guard<std::mutex> lock(memory_mutex);
    for (const Address end : {source, destination}) {
      const auto found = region_at(end);
      if (found != regions.end() && !reaches(current_device(), found->second.physical->device)) {
        die("a copy from or to a peer to which access was not enabled");
      }
    }
  }
  return cuMemcpyAsync(destination, source, bytes, stream);
}

int hipModuleLaunchKernel(void* function, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z,
                          unsigned threads_x, unsigned threads_y, unsigned threads_z,
                          unsigned shared_bytes, Stream stream, void** arguments, void** extra) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  return cuLaunchKernel(function, blocks_x, blocks_y, blocks_z, threads_x, threads_y, threads_z,
                        shared_bytes, stream, arguments, extra);
}

int hipHostRegister(void* data, size_t bytes, unsigned flags) {
  if (const int code = enter(__func__, Needs::kContextAndNoCapture)) return code;
  return cuMemHostRegister_v2(data, bytes, flags);
}

int hipHostUnregister(void* data) {
  if (const int code = enter(__func__, Needs::kContextAndNoCapture)) return code;
  drain();
  return cuMemHostUnregister(data);
}

int hipHostGetDevicePointer(Address* address, void* data, unsigned flags) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  return cuMemHostGetDevicePointer_v2(address, data, flags);
}

int hipDrvPointerGetAttributes(unsigned count, PointerAttribute* attributes, void** values,
                               Address address) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  if (count == 0 || address == 0) return kInvalidValue;
  std::lock_guard<std::mutex> lock(memory_mutex);
  for (unsigned i = 0; i < count; ++i) put_hip_attribute(attributes[i], values[i], address);
  return kSuccess;
}

int hipMemGetAddressRange(Address* base, size_t* bytes, Address address) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  const int result = cuMemGetAddressRange_v2(base, bytes, address);
  return result == kSuccess ? result : static_cast<int>(kNotFound);
}

int hipMemGetAccess(unsigned long long* flags, const Location* location, Address address) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  std::lock_guard<std::mutex> lock(memory_mutex);
  const auto found = region_at(address);
  if (location->type != kOnDevice || found == regions.end() ||
      found->second.kind != Region::Kind::kChunk) {
    return kInvalidValue;
  }
  *flags = found->second.access ? kReadWrite : 0;
  return kSuccess;
}

int hipIpcGetMemHandle(IpcHandle* handle, Address base) {
  if (const int code = enter(__func__, Needs::kContextAndNoCapture)) return code;
  {
    std::lock_guard<std::mutex> lock(memory_mutex);
    const auto found = region_at(base);
    if (found != regions.end() && found->second.kind == Region::Kind::kChunk) {
      die("an IPC handle of mapped memory, over which the kernel driver breaks");
    }
  }
  return cuIpcGetMemHandle(handle, base);
}

int hipIpcOpenMemHandle(Address* base, IpcHandle handle, unsigned flags) {
  if (const int code = enter(__func__, Needs::kContextAndNoCapture)) return code;
  return cuIpcOpenMemHandle_v2(base, handle, flags);
}

int hipIpcCloseMemHandle(Address base) {
  if (const int code = enter(__func__, Needs::kContextAndNoCapture)) return code;
  drain();
  return cuIpcCloseMemHandle(base);
}
}
