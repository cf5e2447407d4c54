#include "engine/driver_manners.h"

#include <algorithm>
#include <cstdlib>
#include <string>

namespace pg_sdma::driver {
namespace {

// Hardware queues that HIP makes for each stream priority.
constexpr int kHardwareQueues = 4;
constexpr int kMostCopyStreams = 8;
// HIP copies with compute units up to this, and from another GPU up to that, unless it honours
// kNoComputeUnits (docs/amd.md).
constexpr size_t kHipSmallCopy = size_t{16} << 10;
constexpr size_t kHipPeerCopyKib = 1024;

int number_in(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  const int number = text == nullptr ? 0 : std::atoi(text);
  return number > 0 ? number : otherwise;
}

bool has(const Library& library, int attribute, int ordinal) {
  int value = 0;
  library.must(library.device_attribute, &value, attribute, ordinal);
  return value != 0;
}

Allocation allocation_by_cuda(const Library& library, Address address) {
  unsigned memory_type = 0;
  unsigned managed = 0;
  unsigned ipc_capable = 0;
  uint64_t handle_types = 0;
  Allocation found;
  PointerAttribute names[] = {kMemoryType, kIsManaged, kDeviceOrdinal,      kIpcCapable,
                              kRangeStart, kRangeSize, kAllowedHandleTypes, kMemoryPool};
  void* values[] = {&memory_type, &managed,     &found.device, &ipc_capable,
                    &found.base,  &found.bytes, &handle_types, &found.pool};
  library.must(library.pointer_attributes, std::size(names), names, values, address);
  found.known = memory_type != 0;
  found.on_device = memory_type == kDeviceMemory;
  found.managed = managed != 0;
  if (ipc_capable != 0) {
    found.exported = Allocation::Export::kHandle;
  } else if ((handle_types & kPosixDescriptor) != 0) {
    found.exported = Allocation::Export::kDescriptors;
  }
  return found;
}

// HIP's attributes say nothing of handles, have 32 bits for sizes, and leave alone what they do not
// know.
Allocation allocation_by_hip(const Library& library, int device, Address address) {
  unsigned memory_type = 0;
  unsigned managed = 0;
  Allocation found;
  PointerAttribute names[] = {kMemoryType, kIsManaged, kDeviceOrdinal};
  void* values[] = {&memory_type, &managed, &found.device};
  library.must(library.pointer_attributes, std::size(names), names, values, address);
  found.known = memory_type != 0;
  found.on_device = memory_type == kDeviceMemory;
  found.managed = managed != 0;
  if (!found.on_device) return found;
  library.must(library.address_range, &found.base, &found.bytes, address);
  // A handle of memory that was mapped piece by piece must not even be asked for: until March 2026
  // the runtime gave one, over which the kernel driver broke. Such memory has access rights, other
  // memory has none.
  const Location location{kOnDevice, device};
  unsigned long long access = 0;
  const bool mapped = library.mapped_access(&access, &location, address) == kSuccess;
  if (!mapped) found.exported = Allocation::Export::kHandle;
  return found;
}

}  // namespace

const char* vendor_name(Vendor vendor) { return vendor == Vendor::kHip ? "HIP" : "CUDA"; }

Allocation allocation_at(const Library& library, int device, Address address) {
  return library.vendor == Vendor::kHip ? allocation_by_hip(library, device, address)
                                        : allocation_by_cuda(library, address);
}

int count_id_attributes(const Library& library) {
  if (library.vendor == Vendor::kHip) return 1;
  uint64_t ids[2] = {};
  PointerAttribute names[] = {kBufferId, kMemoryBlockId};
  void* values[] = {&ids[0], &ids[1]};
  library.must(library.pointer_attributes, 1, names, values, 0);  // fails for other reasons
  return library.pointer_attributes(2, names, values, 0) == kSuccess ? 2 : 1;
}

void check_device(const Library& library, int ordinal) {
  if (library.vendor == Vendor::kHip) {
    if (!has(library, kStreamWaitValue, ordinal)) {
      throw CannotShare("the device has no stream memory operations");
    }
    if (number_in("GPU_STREAMOPS_CP_WAIT", 0) != 0) {
      throw CannotShare("GPU_STREAMOPS_CP_WAIT is set, with which streams wait for signals alone");
    }
    return;
  }
  const char* connections = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  if (connections != nullptr && std::atoi(connections) == 1) {
    throw CannotShare("CUDA_DEVICE_MAX_CONNECTIONS=1, with which one waiting stream holds all");
  }
  if (!has(library, kUnifiedAddressing, ordinal) ||
      !has(library, k64BitStreamMemoryOperations, ordinal)) {
    throw CannotShare("the device has no 64-bit stream memory operations");
  }
  Uuid whole{};
  Uuid uuid{};
  library.must(library.whole_device_uuid, &whole, ordinal);
  library.must(library.device_uuid, &uuid, ordinal);
  if (whole != uuid) throw CannotShare("the device is a MIG instance, which peers cannot reach");
}

void open_device(DriverDevice& device) {
  const Library& library = *device.library;
  if (library.vendor == Vendor::kCuda) {
    // Never released: torch keeps the primary context to the end of the process as well.
    library.must(library.retain_primary_context, &device.context, device.ordinal);
    return;
  }
  // Opening a peer's memory is said to do that too, and did not until September 2025.
  const auto current = device.enter();
  int count = 0;
  library.must(library.device_count, &count);
  for (int peer = 0; peer < count; ++peer) {
    int possible = 0;
    if (peer != device.ordinal) {
      library.must(library.can_access_peer, &possible, device.ordinal, peer);
    }
    if (possible == 0) continue;
    const int result = library.enable_peer_access(peer, 0);
    if (result != kSuccess && result != kPeerAccessAlreadyEnabled) {
      device.fail(library.enable_peer_access.name, result);
    }
  }
}

Link link_between(const Library& library, int device, int peer) {
  int possible = 0;
  library.must(library.can_access_peer, &possible, device, peer);
  if (possible == 0) return Link::kNone;
  if (library.vendor == Vendor::kHip) {
    uint32_t type = 0;
    uint32_t hops = 0;
    library.must(library.link_type, device, peer, &type, &hops);
    return type == kXgmiLink ? Link::kFabric : Link::kPcie;
  }
  // Atomics across the link are what NVLink has and PCIe has not.
  int atomics = 0;
  library.must(library.peer_attribute, &atomics, kNativeAtomics, device, peer);
  return atomics != 0 ? Link::kFabric : Link::kPcie;
}

size_t copy_streams(Vendor vendor) {
  if (vendor == Vendor::kCuda) return 1;
  return static_cast<size_t>(
      std::min(number_in("GPU_MAX_HW_QUEUES", kHardwareQueues), kMostCopyStreams));
}

bool shares_hardware_queues(Vendor vendor) { return vendor == Vendor::kHip; }

Doubts doubts(Vendor vendor) {
  if (vendor == Vendor::kCuda) return {};
  const auto peer_kib =
      static_cast<size_t>(number_in("ROC_P2P_SDMA_SIZE", static_cast<int>(kHipPeerCopyKib)));
  return {{kHipSmallCopy, peer_kib << 10}, /*waits=*/true};
}

void enqueue(const DriverDevice& device, Stream stream, std::vector<MemoryOperation>& operations) {
  const Library& library = *device.library;
  if (library.vendor == Vendor::kCuda) {
    const int result = library.memory_operations(stream, static_cast<unsigned>(operations.size()),
                                                 operations.data(), 0);
    operations.clear();
    if (result != kSuccess) device.fail(library.memory_operations.name, result);
    return;
  }
  // One by one: until the middle of 2026 HIP's batches refused what is right, or ran their
  // operations side by side.
  const std::vector<MemoryOperation> noted = std::move(operations);
  operations.clear();
  for (const MemoryOperation& operation : noted) {
    if (operation.operation == kWaitValue64) {
      device.must(library.wait_value, stream, operation.address, operation.value, operation.flags,
                  UINT64_MAX);
    } else {
      device.must(library.write_value, stream, operation.address, operation.value, operation.flags);
    }
  }
}

}  // namespace pg_sdma::driver
