// What the parts of the stand-in share.
#pragma once

#include <cstdint>
#include <string>

#include "standin.h"

namespace standin {

using namespace pg_sdma::driver;

// CUDA's result codes that the engine does not tell apart.
enum Code : int {
  kInvalidValue = 1,
  kNotInitialized = 3,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kMapFailed = 205,
  kHandleInvalid = 400,
  kNotFound = 500,
  kAlreadyRegistered = 712,
  kNotRegistered = 713,
  kNotPermitted = 800,
  kCaptureUnsupported = 900,
};

struct Settings {
  int devices = 4;
  std::string link = "nvlink";
  bool mig = false;
  bool has_64bit = true;
  bool block_ids = true;
  int queues = 0;
  int depth = 1020;
  int delay_us = 0;
  int peer_copy_us = 0;
  int peer_engines = 1;
};
const Settings& settings();

// Counts the call and checks what all calls have in common. `needs`: what must hold beyond that the
// driver is initialised. Not kSuccess: the call returns it.
enum class Needs { kNothing, kInit, kContext, kContextAndNoCapture };
int enter(const char* name, Needs needs);

// From hipInit() on: waits compare unsigned, and a thread without a context is on device 0.
void use_hip_manners();
bool hip_manners();

int current_device();  // of the calling thread's context
int set_current_device(int device);
bool reaches(int device, int peer);  // HIP: access was enabled
uint64_t next_id();                  // never 0, never given twice in this process

// Whether [address, address + bytes) is device memory that this process may copy from and to.
bool accessible(Address address, size_t bytes);
// Whether it is memory of another process.
bool imported(Address address);
// Whether an 8-byte counter lies at an address that the device has of registered host memory.
bool registered(Address address);
// Whether an operation that is not over touches [address, address + bytes).
bool in_use(Address address, size_t bytes);
// Waits until every stream of this process has run empty.
void drain();

// Waits and writes, in order.
int enqueue_memory_operations(Stream stream, unsigned count, const MemoryOperation* operations);

bool capturing_globally();
void invalidate_captures();

// Something that would corrupt memory on a device: ends the process, loudly.
[[noreturn]] void die(const std::string& what);

}  // namespace standin
