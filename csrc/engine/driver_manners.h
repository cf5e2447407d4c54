// What CUDA's driver and HIP do in different ways: the calls that the engine makes in one and not
// in the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/driver.h"
#include "engine/driver_device.h"
#include "engine/engine.h"

namespace pg_sdma::driver {

const char* vendor_name(Vendor vendor);  // for messages: "CUDA", "HIP"

// What the driver says of an address.
struct Allocation {
  enum class Export {
    kNone,
    kHandle,       // of the whole allocation
    kDescriptors,  // of each physical piece
  };
  bool known = false;
  bool on_device = false;
  bool managed = false;
  int device = 0;
  Export exported = Export::kNone;
  Address base = 0;  // of the whole range, which may be of several pieces
  size_t bytes = 0;
  const void* pool = nullptr;
};
Allocation allocation_at(const Library& library, int device, Address address);

// How many of {buffer id, block id} the driver has.
int count_id_attributes(const Library& library);

// Throws CannotShare when the device lacks what the engine needs.
void check_device(const Library& library, int ordinal);
// Makes the device usable by this process, and what it may reach of others.
void open_device(DriverDevice& device);
Link link_between(const Library& library, int device, int peer);

// How many streams a queue's copies spread over. HIP gives every stream one of few hardware queues.
size_t copy_streams(Vendor vendor);
// Whether waiting streams may hold up others of this process that come to share a hardware queue.
bool shares_hardware_queues(Vendor vendor);
// CUDA's are measured; nobody has run HIP's through this engine yet.
Doubts doubts(Vendor vendor);

// Enqueues the operations in order, and empties them. Throws Failure.
void enqueue(const DriverDevice& device, Stream stream, std::vector<MemoryOperation>& operations);

inline void copy(const DriverDevice& device, Address destination, Address source, size_t bytes,
                 Stream stream) {
  const Library& library = *device.library;
  if (library.vendor == Vendor::kCuda) {
    device.must(library.copy, destination, source, bytes, stream);
  } else {
    device.must(library.copy_of_kind, destination, source, bytes, kNoComputeUnits, stream);
  }
}

}  // namespace pg_sdma::driver
