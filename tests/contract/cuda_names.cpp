// Compiles only if csrc/engine/driver.h says of CUDA's driver what cuda.h says.
#include "engine/driver.h"

#include <cuda.h>

#include <cstddef>

#include "same_call.h"

using namespace pg_sdma::driver;

// -- Functions
#define CHECK_ONE(member, name, ...) \
  static_assert(same_call(&name, &Library::member), #name " takes other arguments");
#define CHECK_CALL(member, cuda, hip, ...) CHECK_ONE(member, cuda, __VA_ARGS__)
PG_SDMA_DRIVER_CALLS(CHECK_CALL)
PG_SDMA_CUDA_CALLS(CHECK_ONE)
#if CUDA_VERSION < 13000  // later headers declare the next version only
PG_SDMA_OPTIONAL_CUDA_CALLS(CHECK_ONE)
#endif

// -- Structures.
static_assert(sizeof(IpcHandle) == sizeof(CUipcMemHandle));
static_assert(sizeof(Uuid) == sizeof(CUuuid));
static_assert(sizeof(Address) == sizeof(CUdeviceptr));
static_assert(sizeof(MemoryHandle) == sizeof(CUmemGenericAllocationHandle));

using Waits = CUstreamBatchMemOpParams::CUstreamMemOpWaitValueParams_st;
using Writes = CUstreamBatchMemOpParams::CUstreamMemOpWriteValueParams_st;
static_assert(sizeof(MemoryOperation) == sizeof(CUstreamBatchMemOpParams));
static_assert(offsetof(MemoryOperation, operation) == offsetof(Waits, operation));
static_assert(offsetof(MemoryOperation, address) == offsetof(Waits, address));
static_assert(offsetof(MemoryOperation, value) == offsetof(Waits, value64));
static_assert(offsetof(MemoryOperation, flags) == offsetof(Waits, flags));
static_assert(offsetof(MemoryOperation, alias) == offsetof(Waits, alias));
static_assert(offsetof(MemoryOperation, operation) == offsetof(Writes, operation));
static_assert(offsetof(MemoryOperation, address) == offsetof(Writes, address));
static_assert(offsetof(MemoryOperation, value) == offsetof(Writes, value64));
static_assert(offsetof(MemoryOperation, flags) == offsetof(Writes, flags));

static_assert(sizeof(Location) == sizeof(CUmemLocation));
static_assert(offsetof(Location, id) == offsetof(CUmemLocation, id));
static_assert(sizeof(AccessDescription) == sizeof(CUmemAccessDesc));
static_assert(offsetof(AccessDescription, flags) == offsetof(CUmemAccessDesc, flags));
static_assert(sizeof(AllocationProperties) == sizeof(CUmemAllocationProp));
static_assert(offsetof(AllocationProperties, handle_types) ==
              offsetof(CUmemAllocationProp, requestedHandleTypes));
static_assert(offsetof(AllocationProperties, location) == offsetof(CUmemAllocationProp, location));

#if CUDA_VERSION >= 12080
static_assert(sizeof(CopyAttributes) == sizeof(CUmemcpyAttributes));
static_assert(offsetof(CopyAttributes, flags) == offsetof(CUmemcpyAttributes, flags));
static_assert(kInStreamOrder == static_cast<int>(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM));
#endif

// -- Constants.
#define SAME(ours, theirs) static_assert(static_cast<long long>(ours) == theirs, #theirs)
SAME(kSuccess, CUDA_SUCCESS);
SAME(kNotReady, CUDA_ERROR_NOT_READY);
SAME(kStreamCaptureImplicit, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
SAME(kUnifiedAddressing, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING);
SAME(k64BitStreamMemoryOperations, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS);
SAME(kNativeAtomics, CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED);
SAME(kMemoryType, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
SAME(kBufferId, CU_POINTER_ATTRIBUTE_BUFFER_ID);
SAME(kIsManaged, CU_POINTER_ATTRIBUTE_IS_MANAGED);
SAME(kDeviceOrdinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
SAME(kIpcCapable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE);
SAME(kRangeStart, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR);
SAME(kRangeSize, CU_POINTER_ATTRIBUTE_RANGE_SIZE);
SAME(kAllowedHandleTypes, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES);
SAME(kMemoryPool, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE);
SAME(kMemoryBlockId, CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID);
SAME(kDeviceMemory, CU_MEMORYTYPE_DEVICE);
SAME(kWaitValue64, CU_STREAM_MEM_OP_WAIT_VALUE_64);
SAME(kWriteValue64, CU_STREAM_MEM_OP_WRITE_VALUE_64);
SAME(kWaitAtLeast, CU_STREAM_WAIT_VALUE_GEQ);
SAME(kWriteWithBarrier, CU_STREAM_WRITE_VALUE_DEFAULT);
SAME(kNonBlocking, CU_STREAM_NON_BLOCKING);
SAME(kNoTiming, CU_EVENT_DISABLE_TIMING);
SAME(kRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED);
SAME(kPortable, CU_MEMHOSTREGISTER_PORTABLE);
SAME(kDeviceMapped, CU_MEMHOSTREGISTER_DEVICEMAP);
SAME(kLazyPeerAccess, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
SAME(kPosixDescriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
SAME(kOnDevice, CU_MEM_LOCATION_TYPE_DEVICE);
SAME(kPinned, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME(kReadWrite, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
