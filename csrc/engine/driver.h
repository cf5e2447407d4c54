// The driver, opened at run time: the functions, types and constants of CUDA's driver API and of
// HIP that the engine uses, declared here so that no toolkit is needed to build. tests/contract
// compares every declaration with the vendors' headers.
//
// One table: most functions take the same arguments under two names. What the drivers do in
// different ways is in driver_manners.h, and nowhere else.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace pg_sdma::driver {

using Address = unsigned long long;  // of device memory
using Context = void*;
using Stream = void*;
using Event = void*;
using MemoryHandle = unsigned long long;  // a physical allocation
using Uuid = std::array<unsigned char, 16>;

enum class Vendor : uint8_t { kCuda, kHip };

struct IpcHandle {
  std::array<char, 64> bytes{};
};

// One stream memory operation: write `value`, or wait until the word is at least `value`.
struct MemoryOperation {
  uint32_t operation = 0;
  Address address = 0;
  uint64_t value = 0;
  uint32_t flags = 0;
  Address alias = 0;
  uint64_t pad = 0;
};

struct Location {
  int type = 0;
  int id = 0;
};

struct AllocationProperties {
  int type = 0;
  int handle_types = 0;
  Location location;
  void* win32_metadata = nullptr;
  unsigned char compression = 0;
  unsigned char gpu_direct_rdma = 0;
  unsigned short usage = 0;
  unsigned char reserved[4] = {};
};

struct AccessDescription {
  Location location;
  int flags = 0;
};

struct CopyAttributes {
  int source_order = 0;
  Location source_hint;
  Location destination_hint;
  unsigned flags = 0;
};

enum Result : int { kSuccess = 0, kNotReady = 600, kStreamCaptureImplicit = 906 };
enum HipResult : int { kPeerAccessAlreadyEnabled = 704 };

enum DeviceAttribute : int { kUnifiedAddressing = 41, k64BitStreamMemoryOperations = 122 };
enum HipDeviceAttribute : int { kStreamWaitValue = 10013 };
enum PeerAttribute : int { kNativeAtomics = 3 };
enum HipLinkType : uint32_t { kPcieLink = 2, kXgmiLink = 4 };

// HIP's numbers are the same, as far as it has them: not kMemoryBlockId.
enum PointerAttribute : int {
  kMemoryType = 2,
  kBufferId = 7,
  kIsManaged = 8,
  kDeviceOrdinal = 9,
  kIpcCapable = 10,
  kRangeStart = 11,
  kRangeSize = 12,
  kAllowedHandleTypes = 14,
  kMemoryPool = 17,
  kMemoryBlockId = 20,
};

enum MemoryType : unsigned { kDeviceMemory = 2 };

enum MemoryOperationType : uint32_t { kWaitValue64 = 4, kWriteValue64 = 5 };
// CUDA compares the difference as a signed number, HIP the values as unsigned ones.
enum WaitFlags : uint32_t { kWaitAtLeast = 0 };
// The write is visible only after all that the stream did before.
enum WriteFlags : uint32_t { kWriteWithBarrier = 0 };

enum SourceOrder : int { kInStreamOrder = 1 };

enum StreamFlags : unsigned { kNonBlocking = 1 };
enum EventFlags : unsigned { kNoTiming = 2 };
enum CaptureMode : int { kRelaxed = 2 };
enum HostRegisterFlags : unsigned { kPortable = 1, kDeviceMapped = 2 };
enum IpcFlags : unsigned { kLazyPeerAccess = 1 };
enum HandleType : int { kPosixDescriptor = 1 };
enum LocationType : int { kOnDevice = 1 };
enum AllocationType : int { kPinned = 1 };
enum AccessFlags : int { kReadWrite = 3 };
// Of HIP: a copy between devices that no compute unit may carry.
enum CopyKind : int { kNoComputeUnits = 1024 };

// X(member, name in CUDA, name in HIP, arguments...). Names carry the version whose signature this
// is.
#define PG_SDMA_DRIVER_CALLS(X)                                                                    \
  X(init, cuInit, hipInit, unsigned flags)                                                         \
  X(error_text, cuGetErrorString, hipDrvGetErrorString, int result, const char** text)             \
  X(device_count, cuDeviceGetCount, hipGetDeviceCount, int* count)                                 \
  X(device_attribute, cuDeviceGetAttribute, hipDeviceGetAttribute, int* value, int attribute,      \
    int device)                                                                                    \
  X(device_uuid, cuDeviceGetUuid_v2, hipDeviceGetUuid, Uuid* uuid, int device)                     \
  X(can_access_peer, cuDeviceCanAccessPeer, hipDeviceCanAccessPeer, int* can, int device,          \
    int peer)                                                                                      \
  X(priority_range, cuCtxGetStreamPriorityRange, hipDeviceGetStreamPriorityRange, int* least,      \
    int* greatest)                                                                                 \
  X(exchange_capture_mode, cuThreadExchangeStreamCaptureMode, hipThreadExchangeStreamCaptureMode,  \
    CaptureMode* mode)                                                                             \
  X(create_stream, cuStreamCreateWithPriority, hipStreamCreateWithPriority, Stream* stream,        \
    unsigned flags, int priority)                                                                  \
  X(destroy_stream, cuStreamDestroy_v2, hipStreamDestroy, Stream stream)                           \
  X(is_capturing, cuStreamIsCapturing, hipStreamIsCapturing, Stream stream, int* status)           \
  X(wait_event, cuStreamWaitEvent, hipStreamWaitEvent, Stream stream, Event event, unsigned flags) \
  X(create_event, cuEventCreate, hipEventCreateWithFlags, Event* event, unsigned flags)            \
  X(destroy_event, cuEventDestroy_v2, hipEventDestroy, Event event)                                \
  X(record_event, cuEventRecord, hipEventRecord, Event event, Stream stream)                       \
  X(query_event, cuEventQuery, hipEventQuery, Event event)                                         \
  X(launch_kernel, cuLaunchKernel, hipModuleLaunchKernel, void* function, unsigned blocks_x,       \
    unsigned blocks_y, unsigned blocks_z, unsigned threads_x, unsigned threads_y,                  \
    unsigned threads_z, unsigned shared_bytes, Stream stream, void** arguments, void** extra)      \
  X(register_host, cuMemHostRegister_v2, hipHostRegister, void* data, size_t bytes,                \
    unsigned flags)                                                                                \
  X(unregister_host, cuMemHostUnregister, hipHostUnregister, void* data)                           \
  X(host_device_address, cuMemHostGetDevicePointer_v2, hipHostGetDevicePointer, Address* address,  \
    void* data, unsigned flags)                                                                    \
  X(pointer_attributes, cuPointerGetAttributes, hipDrvPointerGetAttributes, unsigned count,        \
    PointerAttribute* attributes, void** values, Address address)                                  \
  X(address_range, cuMemGetAddressRange_v2, hipMemGetAddressRange, Address* base, size_t* bytes,   \
    Address address)                                                                               \
  X(get_ipc_handle, cuIpcGetMemHandle, hipIpcGetMemHandle, IpcHandle* handle, Address base)        \
  X(open_ipc_handle, cuIpcOpenMemHandle_v2, hipIpcOpenMemHandle, Address* base, IpcHandle handle,  \
    unsigned flags)                                                                                \
  X(close_ipc_handle, cuIpcCloseMemHandle, hipIpcCloseMemHandle, Address base)

// X(member, name in CUDA, arguments...): what HIP does otherwise, or what is not asked of it. The
// functions are null where the driver is HIP's, and the other way round below.
#define PG_SDMA_CUDA_CALLS(X)                                                                   \
  X(whole_device_uuid, cuDeviceGetUuid, Uuid* uuid, int device)                                 \
  X(peer_attribute, cuDeviceGetP2PAttribute, int* value, PeerAttribute attribute, int device,   \
    int peer)                                                                                   \
  X(retain_primary_context, cuDevicePrimaryCtxRetain, Context* context, int device)             \
  X(current_context, cuCtxGetCurrent, Context* context)                                         \
  X(push_context, cuCtxPushCurrent_v2, Context context)                                         \
  X(pop_context, cuCtxPopCurrent_v2, Context* context)                                          \
  X(memory_operations, cuStreamBatchMemOp_v2, Stream stream, unsigned count,                    \
    MemoryOperation* operations, unsigned flags)                                                \
  X(copy, cuMemcpyAsync, Address destination, Address source, size_t bytes, Stream stream)      \
  X(retain_allocation, cuMemRetainAllocationHandle, MemoryHandle* handle, void* address)        \
  X(release_allocation, cuMemRelease, MemoryHandle handle)                                      \
  X(export_allocation, cuMemExportToShareableHandle, void* out, MemoryHandle handle,            \
    HandleType type, unsigned long long flags)                                                  \
  X(import_allocation, cuMemImportFromShareableHandle, MemoryHandle* handle, void* shareable,   \
    HandleType type)                                                                            \
  X(reserve_addresses, cuMemAddressReserve, Address* base, size_t bytes, size_t alignment,      \
    Address hint, unsigned long long flags)                                                     \
  X(free_addresses, cuMemAddressFree, Address base, size_t bytes)                               \
  X(map, cuMemMap, Address address, size_t bytes, size_t offset, MemoryHandle handle,           \
    unsigned long long flags)                                                                   \
  X(unmap, cuMemUnmap, Address address, size_t bytes)                                           \
  X(set_access, cuMemSetAccess, Address address, size_t bytes, const AccessDescription* access, \
    size_t count)

// The same, for what an older driver may lack: the member's function is then null.
#define PG_SDMA_OPTIONAL_CUDA_CALLS(X)                                                        \
  X(copy_batch, cuMemcpyBatchAsync, Address* destinations, Address* sources, size_t* sizes,   \
    size_t count, CopyAttributes* attributes, size_t* first_of_each, size_t attributes_count, \
    size_t* failed, Stream stream)

// X(member, name in HIP, arguments...)
#define PG_SDMA_HIP_CALLS(X)                                                                       \
  X(current_device, hipGetDevice, int* device)                                                     \
  X(set_device, hipSetDevice, int device)                                                          \
  X(enable_peer_access, hipDeviceEnablePeerAccess, int peer, unsigned flags)                       \
  X(link_type, hipExtGetLinkTypeAndHopCount, int device, int peer, uint32_t* type, uint32_t* hops) \
  X(wait_value, hipStreamWaitValue64, Stream stream, Address address, uint64_t value,              \
    unsigned flags, uint64_t mask)                                                                 \
  X(write_value, hipStreamWriteValue64, Stream stream, Address address, uint64_t value,            \
    unsigned flags)                                                                                \
  X(copy_of_kind, hipMemcpyAsync, Address destination, Address source, size_t bytes,               \
    CopyKind kind, Stream stream)                                                                  \
  X(mapped_access, hipMemGetAccess, unsigned long long* flags, const Location* location,           \
    Address address)

// A driver function and the name to report it by. Calling it gives the driver's result code.
template <class... Arguments>
struct Call {
  const char* name = nullptr;
  int (*function)(Arguments...) = nullptr;
  int operator()(std::type_identity_t<Arguments>... arguments) const {
    return function(arguments...);
  }
};

// A driver call failed.
class Failure : public std::runtime_error {
 public:
  Failure(int result, const std::string& what) : std::runtime_error(what), result_(result) {}
  int result() const { return result_; }

 private:
  int result_;
};

class Library {
 public:
  // Opens `path`, or the vendor's driver when it is empty (of HIP the one that the process has
  // loaded, where it has), and initialises it. Throws
  // std::runtime_error with the reason.
  static std::shared_ptr<const Library> open(Vendor vendor, const std::string& path);

  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  const Vendor vendor;

#define PG_SDMA_DECLARE_ONE(member, name, ...)       \
  static auto declare_##member(__VA_ARGS__)->int;    \
  template <class... A>                              \
  static Call<A...> call_of_##member(int (*)(A...)); \
  decltype(call_of_##member(&declare_##member)) member;
#define PG_SDMA_DECLARE(member, cuda, hip, ...) PG_SDMA_DECLARE_ONE(member, cuda, __VA_ARGS__)
  PG_SDMA_DRIVER_CALLS(PG_SDMA_DECLARE)
  PG_SDMA_CUDA_CALLS(PG_SDMA_DECLARE_ONE)
  PG_SDMA_OPTIONAL_CUDA_CALLS(PG_SDMA_DECLARE_ONE)
  PG_SDMA_HIP_CALLS(PG_SDMA_DECLARE_ONE)
#undef PG_SDMA_DECLARE
#undef PG_SDMA_DECLARE_ONE

  // Makes the call; throws Failure naming it and the driver's reason when it fails.
  template <class... Arguments>
  void must(const Call<Arguments...>& call, std::type_identity_t<Arguments>... arguments) const {
    const int result = call.function(arguments...);
    if (result != kSuccess) throw Failure(result, explain(call.name, result));
  }
  std::string explain(const char* call, int result) const;

 private:
  explicit Library(Vendor vendor) : vendor(vendor) {}
};

// Lets this thread make calls that another thread's stream capture would forbid, for a scope.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Library& library) : library_(library) {
    library_.exchange_capture_mode(&mode_);
  }
  ~RelaxedCapture() { library_.exchange_capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Library& library_;
  CaptureMode mode_ = kRelaxed;
};

}  // namespace pg_sdma::driver
