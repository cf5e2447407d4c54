// Compiles only if csrc/engine/driver.h says of HIP what hip_runtime_api.h says.
#define __HIP_PLATFORM_AMD__ 1
#include "engine/driver.h"

#include <hip/hip_runtime_api.h>
#include <hsa/hsa_ext_amd.h>

#include <cstddef>

#include "same_call.h"

using namespace pg_sdma::driver;

// -- Functions. hipMallocManaged and its like are overloaded, these are not.
#define CHECK_ONE(member, name, ...) \
  static_assert(same_call(&name, &Library::member), #name " takes other arguments");
#define CHECK_CALL(member, cuda, hip, ...) CHECK_ONE(member, hip, __VA_ARGS__)
PG_SDMA_DRIVER_CALLS(CHECK_CALL)
PG_SDMA_HIP_CALLS(CHECK_ONE)

// -- Structures.
static_assert(sizeof(IpcHandle) == sizeof(hipIpcMemHandle_t));
static_assert(sizeof(Uuid) == sizeof(hipUUID));
static_assert(sizeof(Address) == sizeof(hipDeviceptr_t));
static_assert(sizeof(Location) == sizeof(hipMemLocation));
static_assert(offsetof(Location, type) == offsetof(hipMemLocation, type));
static_assert(offsetof(Location, id) == offsetof(hipMemLocation, id));

// -- Constants.
#define SAME(ours, theirs) static_assert(static_cast<long long>(ours) == theirs, #theirs)
SAME(kSuccess, hipSuccess);
SAME(kNotReady, hipErrorNotReady);
SAME(kStreamCaptureImplicit, hipErrorStreamCaptureImplicit);
SAME(kPeerAccessAlreadyEnabled, hipErrorPeerAccessAlreadyEnabled);
SAME(kStreamWaitValue, hipDeviceAttributeCanUseStreamWaitValue);
SAME(kPcieLink, HSA_AMD_LINK_INFO_TYPE_PCIE);
SAME(kXgmiLink, HSA_AMD_LINK_INFO_TYPE_XGMI);
SAME(kMemoryType, HIP_POINTER_ATTRIBUTE_MEMORY_TYPE);
SAME(kBufferId, HIP_POINTER_ATTRIBUTE_BUFFER_ID);
SAME(kIsManaged, HIP_POINTER_ATTRIBUTE_IS_MANAGED);
SAME(kDeviceOrdinal, HIP_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
SAME(kDeviceMemory, hipMemoryTypeDevice);
SAME(kWaitAtLeast, hipStreamWaitValueGte);
SAME(kNonBlocking, hipStreamNonBlocking);
SAME(kNoTiming, hipEventDisableTiming);
SAME(kRelaxed, hipStreamCaptureModeRelaxed);
SAME(kPortable, hipHostRegisterPortable);
SAME(kDeviceMapped, hipHostRegisterMapped);
SAME(kLazyPeerAccess, hipIpcMemLazyEnablePeerAccess);
SAME(kOnDevice, hipMemLocationTypeDevice);
SAME(kNoComputeUnits, hipMemcpyDeviceToDeviceNoCU);
