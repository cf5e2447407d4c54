// Initialisation, devices, contexts, failures on demand.
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "broken.h"
#include "state.h"

namespace standin {
namespace {

struct Failure {
  std::string name;
  long call = 0;
  int code = 999;
};

std::mutex mutex;
std::map<std::string, long> calls;
thread_local std::map<std::string, long> calls_here;
bool initialised = false;
std::atomic<bool> hip{false};
Settings read_settings;
Failure failure;
uint64_t last_id = 0;
int contexts[16];  // a context is the address of its device's element

thread_local std::array<Context, 8> context_stack{};
thread_local size_t context_depth = 0;
thread_local CaptureMode capture_mode = static_cast<CaptureMode>(0);  // global

int number(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

void read_environment() {
  Settings read;
  read.devices = number("STANDIN_DEVICES", read.devices);
  if (const char* link = std::getenv("STANDIN_LINK")) read.link = link;
  read.mig = number("STANDIN_MIG", read.mig) != 0;
  read.has_64bit = number("STANDIN_64BIT", read.has_64bit) != 0;
  read.block_ids = number("STANDIN_BLOCK_IDS", read.block_ids) != 0;
  read.queues = number("STANDIN_QUEUES", hip ? 4 : read.queues);
  read.depth = number("STANDIN_DEPTH", read.depth);
  read.delay_us = number("STANDIN_DELAY_US", read.delay_us);
  read.peer_copy_us = number("STANDIN_PEER_COPY_US", read.peer_copy_us);
  read.peer_engines = number("STANDIN_PEER_ENGINES", read.peer_engines);
  read_settings = read;
  read_broken(std::getenv("STANDIN_FAULT"));
  if (const char* fail = std::getenv("STANDIN_FAIL")) {
    char name[64] = {};
    if (std::sscanf(fail, "%63[^:]:%ld:%d", name, &failure.call, &failure.code) < 2) {
      die(std::string("STANDIN_FAIL=") + fail);
    }
    failure.name = name;
  }
}

Context context_of(int device) { return &contexts[device]; }
bool is_device(int device) { return device >= 0 && device < settings().devices; }
bool is_context(Context context) {
  return context >= &contexts[0] && context < &contexts[settings().devices];
}
Context current() {
  if (context_depth > 0) return context_stack[context_depth - 1];
  return hip ? context_of(0) : nullptr;
}

Uuid uuid_of(int device, bool instance) {
  Uuid uuid{};
  std::memcpy(uuid.data(), "stand-in GPU", 12);
  uuid[14] = instance ? 1 : 0;
  uuid[15] = static_cast<unsigned char>(device);
  return uuid;
}

}  // namespace

const Settings& settings() { return read_settings; }

int enter(const char* name, Needs needs) {
  std::lock_guard<std::mutex> lock(mutex);
  const long call = ++calls[name];
  ++calls_here[name];
  if (failure.name == name && failure.call == call) return failure.code;
  if (needs == Needs::kNothing) return kSuccess;
  if (!initialised) return kNotInitialized;
  if (needs == Needs::kInit) return kSuccess;
  if (current() == nullptr) return kInvalidContext;
  if (needs == Needs::kContextAndNoCapture && capture_mode != kRelaxed && capturing_globally()) {
    invalidate_captures();
    return kCaptureUnsupported;
  }
  return kSuccess;
}

void use_hip_manners() { hip = true; }
bool hip_manners() { return hip; }

int set_current_device(int device) {
  if (!is_device(device)) return kInvalidDevice;
  if (context_depth == 0) context_depth = 1;
  context_stack[context_depth - 1] = context_of(device);
  return kSuccess;
}

int current_device() { return static_cast<int>(static_cast<int*>(current()) - contexts); }

uint64_t next_id() {
  std::lock_guard<std::mutex> lock(mutex);
  return ++last_id;
}

void die(const std::string& what) {
  std::fprintf(stderr, "stand-in: %s\n", what.c_str());
  std::abort();
}

}  // namespace standin

using namespace standin;

extern "C" {

int cuInit(unsigned flags) {
  if (const int code = enter(__func__, Needs::kNothing)) return code;
  if (flags != 0) return kInvalidValue;
  std::lock_guard<std::mutex> lock(mutex);
  if (!initialised) read_environment();
  initialised = true;
  return kSuccess;
}

int cuGetErrorString(int result, const char** text) {
  static thread_local char line[32];
  std::snprintf(line, sizeof line, "stand-in result %d", result);
  *text = line;
  return kSuccess;
}

int cuDeviceGetCount(int* count) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  *count = settings().devices;
  return kSuccess;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  if (!is_device(device)) return kInvalidDevice;
  switch (attribute) {
    case kUnifiedAddressing:
      *value = 1;
      return kSuccess;
    case k64BitStreamMemoryOperations:
      *value = settings().has_64bit;
      return kSuccess;
    default:
      return kInvalidValue;
  }
}

int cuDeviceGetUuid_v2(Uuid* uuid, int device) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  if (!is_device(device)) return kInvalidDevice;
  *uuid = uuid_of(device, settings().mig);
  return kSuccess;
}

int cuDeviceGetUuid(Uuid* uuid, int device) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  if (!is_device(device)) return kInvalidDevice;
  *uuid = uuid_of(device, false);
  return kSuccess;
}

int cuDeviceCanAccessPeer(int* can, int device, int peer) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  if (!is_device(device) || !is_device(peer)) return kInvalidDevice;
  *can = device != peer && settings().link != "none";
  return kSuccess;
}

int cuDeviceGetP2PAttribute(int* value, PeerAttribute attribute, int device, int peer) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  if (!is_device(device) || !is_device(peer) || device == peer) return kInvalidDevice;
  if (attribute != kNativeAtomics) return kInvalidValue;
  *value = settings().link == "nvlink";
  return kSuccess;
}

int cuDevicePrimaryCtxRetain(Context* context, int device) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  if (!is_device(device)) return kInvalidDevice;
  *context = context_of(device);
  return kSuccess;
}

int cuCtxGetCurrent(Context* context) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  *context = current();
  return kSuccess;
}

int cuCtxPushCurrent_v2(Context context) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  if (!is_context(context)) return kInvalidContext;
  if (context_depth == context_stack.size()) die("contexts are pushed and never popped");
  context_stack[context_depth++] = context;
  return kSuccess;
}

int cuCtxPopCurrent_v2(Context* context) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  if (context_depth == 0) return kInvalidContext;
  *context = context_stack[--context_depth];
  return kSuccess;
}

int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  *least = 0;
  *greatest = -5;
  return kSuccess;
}

int cuThreadExchangeStreamCaptureMode(CaptureMode* mode) {
  if (const int code = enter(__func__, Needs::kInit)) return code;
  std::swap(*mode, capture_mode);
  return kSuccess;
}

void standin_fail_next(const char* name, int code) {
  std::lock_guard<std::mutex> lock(mutex);
  failure = {name, calls[name] + 1, code};
}

long standin_calls(const char* name) {
  std::lock_guard<std::mutex> lock(mutex);
  return calls[name];
}

long standin_calls_here(const char* name) { return calls_here[name]; }
}
