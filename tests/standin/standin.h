// A stand-in for the driver libraries of CUDA and HIP: the functions that the engine uses, by both
// vendors' names, over memory files and threads, so that the engine's own code runs where there is
// no GPU.
//
// "Device memory" is memfds, which other processes map as IPC would; streams are queues that
// threads work off in order. It is strict: what the vendors leave undefined is an error here, or
// aborts. ASSUMPTIONS.md says what it takes for granted of CUDA, and which GPU test checks it; and
// what of HIP, by its sources. After hipInit() it has HIP's manners, also where CUDA's names are
// called.
//
// Environment, read when the library is initialised:
//   STANDIN_DEVICES=4          devices
//   STANDIN_LINK=nvlink        what joins two of them: nvlink, pcie or none
//   STANDIN_MIG=0              1: devices are MIG instances
//   STANDIN_64BIT=1            0: no 64-bit stream memory operations
//   STANDIN_BLOCK_IDS=1        0: an older driver, without ids of physical memory
//   STANDIN_QUEUES=0           hardware queues that all streams share; 0: one for each stream (HIP:
//                              4)
//   STANDIN_DEPTH=1020         entries of a stream before enqueuing blocks
//   STANDIN_DELAY_US=0         each operation starts up to so much later, at random
//   STANDIN_PEER_COPY_US=0     a copy from or to memory of another process takes so long
//   STANDIN_PEER_ENGINES=1     engines for such copies: one for all streams, or 0: one for each
//   STANDIN_FAIL=name:n[:code] the n-th call of a function gives this result (999)
//   STANDIN_FAULT=kind[:bytes[:bytes]]   a broken driver (broken.h), for copies of that many bytes
#pragma once

#include <cstddef>

#include "engine/driver.h"

extern "C" {

// The engine's functions.
namespace pg_sdma::driver {
#define STANDIN_DECLARE(member, name, ...) int name(__VA_ARGS__);
#define STANDIN_DECLARE_BOTH(member, cuda, hip, ...) \
  int cuda(__VA_ARGS__);                             \
  int hip(__VA_ARGS__);
PG_SDMA_DRIVER_CALLS(STANDIN_DECLARE_BOTH)
PG_SDMA_CUDA_CALLS(STANDIN_DECLARE)
PG_SDMA_OPTIONAL_CUDA_CALLS(STANDIN_DECLARE)
PG_SDMA_HIP_CALLS(STANDIN_DECLARE)
#undef STANDIN_DECLARE
#undef STANDIN_DECLARE_BOTH
}  // namespace pg_sdma::driver

// What the tests need besides.
int cuStreamSynchronize(void* stream);
int cuMemAlloc_v2(unsigned long long* address, size_t bytes);
int cuMemAllocManaged(unsigned long long* address, size_t bytes, unsigned flags);
int cuMemFree_v2(unsigned long long address);
int cuMemcpyHtoD_v2(unsigned long long destination, const void* source, size_t bytes);
int cuMemcpyDtoH_v2(void* destination, unsigned long long source, size_t bytes);
int cuMemGetAllocationGranularity(size_t* bytes,
                                  const pg_sdma::driver::AllocationProperties* properties,
                                  int what);
int cuMemCreate(unsigned long long* handle, size_t bytes,
                const pg_sdma::driver::AllocationProperties* properties, unsigned long long flags);
int cuStreamBeginCapture_v2(void* stream, int mode);
int cuStreamEndCapture(void* stream, void** graph);

// From now on new streams share so many hardware queues, as with STANDIN_QUEUES.
void standin_share_queues(int queues);

// The next call of a function gives this result, as with STANDIN_FAIL.
void standin_fail_next(const char* name, int code);

// How often a function was called in this process, and by this thread.
long standin_calls(const char* name);
long standin_calls_here(const char* name);
// Bytes of device memory that this process keeps allocated, and bytes of peers' that it has mapped.
size_t standin_allocated();
size_t standin_mapped();
// Handles of physical memory that this process has yet to release.
size_t standin_handles();
}
