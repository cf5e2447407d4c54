// Streams, events, copies and memory operations. A hardware queue is a thread that works off its
// entries in order; a stream belongs to one, alone or with others.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <climits>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "broken.h"
#include "state.h"

namespace standin {
namespace {

// As many as Launch of engine.h has.
constexpr size_t kLaunchArguments = 8;

// What an event recorded: a point of a stream.
using Point = std::shared_ptr<std::atomic<bool>>;

struct StreamState;
struct Operation {
  enum class Kind { kCopy, kWait, kWrite, kRecord, kAwait, kLaunch } kind;
  StreamState* stream = nullptr;
  Address destination = 0;  // kCopy; of kWait and kWrite, the counter
  Address source = 0;
  size_t bytes = 0;
  uint64_t value = 0;
  Point point{};                       // kRecord, kAwait
  void (*function)(void**) = nullptr;  // kLaunch
  std::array<uint64_t, kLaunchArguments> arguments{};
};

struct HardwareQueue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Operation> entries;  // the first one is being worked on
};

struct StreamState {
  HardwareQueue* queue = nullptr;
  int entries = 0;  // under the queue's mutex
  bool destroyed = false;
  int capture = -1;  // the mode, while capturing
  bool capture_failed = false;
};

struct EventState {
  Point point;
};

// Everything here outlives main(): the queues' threads do.
std::mutex mutex;
auto& queues = *new std::vector<HardwareQueue*>();
auto& streams = *new std::set<StreamState*>();
auto& events = *new std::set<EventState*>();
std::atomic<int> global_captures{0};
int shared_queues = -1;  // until a stream is created: as the settings say
auto& shared = *new std::vector<HardwareQueue*>();
size_t next_shared = 0;

constexpr timespec kMillisecond{0, 1000000};

std::atomic<uint64_t>& counter_at(Address address) {
  return *reinterpret_cast<std::atomic<uint64_t>*>(address);
}

// Of the counter's low word: the CPU, which wakes nobody, is found out by looking again.
void futex(Address address, int operation, uint32_t value) {
  syscall(SYS_futex, address, operation, value, &kMillisecond, nullptr, 0);
}

void wait_for(const Operation& operation) {
  auto& counter = counter_at(operation.destination);
  const auto over = [&](uint64_t seen) {
    if (hip_manners()) return seen >= operation.value;
    return static_cast<int64_t>(seen - operation.value) >= 0;
  };
  for (uint64_t seen = counter; !over(seen); seen = counter) {
    futex(operation.destination, FUTEX_WAIT, static_cast<uint32_t>(seen));
  }
}

void make_copy(const Operation& operation) {
  const CopyPlan plan = plan_copy(operation.destination, operation.source, operation.bytes);
  while (plan.does == CopyPlan::Does::kHang) pause();
  if (plan.does == CopyPlan::Does::kNothing) return;
  // A broken driver's copies from several queues may go astray to one place.
  static std::mutex astray;
  std::unique_lock<std::mutex> alone(astray, std::defer_lock);
  if (plan.destination != operation.destination) alone.lock();
  static std::mutex engine;
  std::unique_lock<std::mutex> alone_with_peers(engine, std::defer_lock);
  const auto takes = std::chrono::microseconds(settings().peer_copy_us);
  if (takes.count() > 0 && (imported(plan.source) || imported(plan.destination))) {
    if (settings().peer_engines == 1) alone_with_peers.lock();
    std::this_thread::sleep_for(takes);
  }
  std::memcpy(reinterpret_cast<void*>(plan.destination), reinterpret_cast<const void*>(plan.source),
              operation.bytes);
}

void execute(const Operation& operation) {
  switch (operation.kind) {
    case Operation::Kind::kCopy:
      make_copy(operation);
      break;
    case Operation::Kind::kWait:
      if (!next_wait_ends_early()) wait_for(operation);
      break;
    case Operation::Kind::kWrite:
      counter_at(operation.destination) = operation.value;
      futex(operation.destination, FUTEX_WAKE, INT_MAX);
      break;
    case Operation::Kind::kRecord:
      *operation.point = true;
      operation.point->notify_all();
      break;
    case Operation::Kind::kAwait:
      operation.point->wait(false);
      break;
    case Operation::Kind::kLaunch: {
      auto words = operation.arguments;
      std::array<void*, kLaunchArguments> arguments;
      for (size_t i = 0; i < arguments.size(); ++i) arguments[i] = &words[i];
      operation.function(arguments.data());
      break;
    }
  }
}

void work(HardwareQueue& queue) {
  std::minstd_rand random(static_cast<unsigned>(getpid()) + static_cast<unsigned>(next_id()));
  std::unique_lock<std::mutex> lock(queue.mutex);
  for (;;) {
    queue.changed.wait(lock, [&] { return !queue.entries.empty(); });
    const Operation operation = queue.entries.front();
    lock.unlock();
    if (const int delay = settings().delay_us) {
      std::this_thread::sleep_for(
          std::chrono::microseconds(random() % static_cast<unsigned>(delay)));
    }
    execute(operation);
    lock.lock();
    queue.entries.pop_front();
    if (--operation.stream->entries == 0 && operation.stream->destroyed) delete operation.stream;
    queue.changed.notify_all();
  }
}

HardwareQueue* new_queue() {
  auto* queue = new HardwareQueue;
  std::thread([queue] { work(*queue); }).detach();
  queues.push_back(queue);
  return queue;
}

HardwareQueue* queue_for_stream() {
  if (shared_queues < 0) shared_queues = settings().queues;
  if (shared_queues == 0) return new_queue();
  while (shared.size() < static_cast<size_t>(shared_queues)) shared.push_back(new_queue());
  return shared[next_shared++ % static_cast<size_t>(shared_queues)];
}

// By either of its handles: null, and CU_STREAM_LEGACY.
bool is_default(Stream stream) { return reinterpret_cast<uintptr_t>(stream) <= 1; }

StreamState* find(Stream stream) {
  std::lock_guard<std::mutex> lock(mutex);
  static auto* default_stream = new StreamState{queue_for_stream()};
  if (is_default(stream)) return default_stream;
  auto* state = static_cast<StreamState*>(stream);
  return streams.count(state) == 1 ? state : nullptr;
}

void fail_capture(StreamState& stream) { stream.capture_failed = true; }

int enqueue(Stream stream, std::vector<Operation> operations) {
  StreamState* state = find(stream);
  if (state == nullptr) return kHandleInvalid;
  if (state->capture >= 0) {
    fail_capture(*state);
    return kCaptureUnsupported;
  }
  std::unique_lock<std::mutex> lock(state->queue->mutex);
  for (Operation& operation : operations) {
    state->queue->changed.wait(lock, [&] { return state->entries < settings().depth; });
    operation.stream = state;
    ++state->entries;
    state->queue->entries.push_back(std::move(operation));
    state->queue->changed.notify_all();
  }
  return kSuccess;
}

void run_empty(StreamState& state) {
  std::unique_lock<std::mutex> lock(state.queue->mutex);
  state.queue->changed.wait(lock, [&] { return state.entries == 0; });
}

bool overlaps(Address a, size_t a_bytes, Address b, size_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

EventState* find_event(Event event) {
  std::lock_guard<std::mutex> lock(mutex);
  auto* state = static_cast<EventState*>(event);
  return events.count(state) == 1 ? state : nullptr;
}

}  // namespace

bool in_use(Address address, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  for (HardwareQueue* queue : queues) {
    std::lock_guard<std::mutex> queue_lock(queue->mutex);
    for (const Operation& operation : queue->entries) {
      // What a launch does with its arguments is not known: those that are addresses count.
      for (const uint64_t word : operation.arguments) {
        if (overlaps(address, bytes, word, 1)) return true;
      }
      const bool copy = operation.kind == Operation::Kind::kCopy;
      const size_t size = copy ? operation.bytes : 8;
      if (overlaps(address, bytes, operation.destination, size)) return true;
      if (copy && overlaps(address, bytes, operation.source, size)) return true;
    }
  }
  return false;
}

void drain() {
  std::vector<HardwareQueue*> all;
  {
    std::lock_guard<std::mutex> lock(mutex);
    all = queues;
  }
  for (HardwareQueue* queue : all) {
    std::unique_lock<std::mutex> lock(queue->mutex);
    queue->changed.wait(lock, [&] { return queue->entries.empty(); });
  }
}

int enqueue_memory_operations(Stream stream, unsigned count, const MemoryOperation* operations) {
  std::vector<Operation> batch;
  for (unsigned i = 0; i < count; ++i) {
    const MemoryOperation& given = operations[i];
    if (!registered(given.address) || given.flags != 0) return kInvalidValue;
    if (given.operation != kWaitValue64 && given.operation != kWriteValue64) return kInvalidValue;
    Operation operation{given.operation == kWaitValue64 ? Operation::Kind::kWait
                                                        : Operation::Kind::kWrite};
    operation.destination = given.address;
    operation.value = given.value;
    batch.push_back(operation);
  }
  const int result = enqueue(stream, std::move(batch));
  if (result == kSuccess && waits_are_broken()) run_empty(*find(stream));
  return result;
}

bool capturing_globally() { return global_captures > 0; }

void invalidate_captures() {
  std::lock_guard<std::mutex> lock(mutex);
  for (StreamState* stream : streams) {
    if (stream->capture >= 0) fail_capture(*stream);
  }
}

}  // namespace standin

using namespace standin;

extern "C" {

void standin_share_queues(int count) {
  std::lock_guard<std::mutex> lock(mutex);
  shared_queues = count;
}

int cuStreamCreateWithPriority(Stream* stream, unsigned flags, int priority) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  if (flags != kNonBlocking || priority > 0 || priority < -5) return kInvalidValue;
  std::lock_guard<std::mutex> lock(mutex);
  auto* state = new StreamState{queue_for_stream()};
  streams.insert(state);
  *stream = state;
  return kSuccess;
}

int cuStreamDestroy_v2(Stream stream) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  StreamState* state = find(stream);
  if (state == nullptr || stream == nullptr) return kHandleInvalid;
  std::lock_guard<std::mutex> lock(mutex);
  streams.erase(state);
  std::lock_guard<std::mutex> queue_lock(state->queue->mutex);
  state->destroyed = true;
  if (state->entries == 0) delete state;
  return kSuccess;
}

int cuStreamSynchronize(Stream stream) {
  if (const int code = enter(__func__, Needs::kContextAndNoCapture)) return code;
  StreamState* state = find(stream);
  if (state == nullptr) return kHandleInvalid;
  run_empty(*state);
  return kSuccess;
}

int cuStreamIsCapturing(Stream stream, int* status) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  const StreamState* state = find(stream);
  if (state == nullptr) return kHandleInvalid;
  if (stream == nullptr && capturing_globally()) return kStreamCaptureImplicit;
  *status = state->capture < 0 ? 0 : (state->capture_failed ? 2 : 1);
  return kSuccess;
}

int cuStreamBeginCapture_v2(Stream stream, int mode) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  StreamState* state = find(stream);
  if (state == nullptr || stream == nullptr || state->capture >= 0) return kInvalidValue;
  state->capture = mode;
  state->capture_failed = false;
  if (mode != kRelaxed) ++global_captures;
  return kSuccess;
}

int cuStreamEndCapture(Stream stream, void** graph) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  StreamState* state = find(stream);
  if (state == nullptr || state->capture < 0) return kInvalidValue;
  if (state->capture != kRelaxed) --global_captures;
  state->capture = -1;
  *graph = nullptr;
  if (state->capture_failed) return kCaptureUnsupported;
  return kSuccess;
}

int cuStreamWaitEvent(Stream stream, Event event, unsigned flags) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  const EventState* state = find_event(event);
  if (state == nullptr) return kHandleInvalid;
  if (flags != 0) return kInvalidValue;
  if (!state->point) return kSuccess;  // never recorded: nothing to wait for
  Operation operation{Operation::Kind::kAwait};
  operation.point = state->point;
  return enqueue(stream, {std::move(operation)});
}

int cuStreamBatchMemOp_v2(Stream stream, unsigned count, MemoryOperation* operations,
                          unsigned flags) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  if (count == 0 || count >= 256 || flags != 0) return kInvalidValue;
  return enqueue_memory_operations(stream, count, operations);
}

int cuMemcpyAsync(Address destination, Address source, size_t bytes, Stream stream) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  if (!accessible(destination, bytes) || !accessible(source, bytes)) return kInvalidValue;
  if (bytes == 0) return kSuccess;
  Operation operation{Operation::Kind::kCopy};
  operation.destination = destination;
  operation.source = source;
  operation.bytes = bytes;
  return enqueue(stream, {operation});
}

// A batch's copies come in any order: here, the last one first.
int cuMemcpyBatchAsync(Address* destinations, Address* sources, size_t* sizes, size_t count,
                       CopyAttributes* attributes, size_t* first_of_each, size_t attributes_count,
                       size_t*, Stream stream) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  if (count == 0 || attributes_count != 1 || *first_of_each != 0 || is_default(stream) ||
      attributes->source_order != kInStreamOrder) {
    return kInvalidValue;
  }
  std::vector<Operation> batch;
  for (size_t i = count; i-- > 0;) {
    if (sizes[i] == 0 || !accessible(destinations[i], sizes[i]) ||
        !accessible(sources[i], sizes[i])) {
      return kInvalidValue;
    }
    Operation operation{Operation::Kind::kCopy};
    operation.destination = destinations[i];
    operation.source = sources[i];
    operation.bytes = sizes[i];
    batch.push_back(operation);
  }
  return enqueue(stream, std::move(batch));
}

// "Kernels" are functions of this process, called once for a launch, with the driver's arguments of
// which each has 8 bytes. The driver takes them over before it returns.
int cuLaunchKernel(void* function, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z,
                   unsigned threads_x, unsigned threads_y, unsigned threads_z, unsigned,
                   Stream stream, void** arguments, void** extra) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  const auto out_of_range = [](unsigned size, unsigned most) { return size == 0 || size > most; };
  if (function == nullptr || arguments == nullptr || extra != nullptr ||
      out_of_range(blocks_x, INT_MAX) || out_of_range(threads_x, 1024) || blocks_y != 1 ||
      blocks_z != 1 || threads_y != 1 || threads_z != 1) {
    return kInvalidValue;
  }
  Operation operation{Operation::Kind::kLaunch};
  operation.function = reinterpret_cast<void (*)(void**)>(function);
  for (size_t i = 0; i < operation.arguments.size(); ++i) {
    std::memcpy(&operation.arguments[i], arguments[i], sizeof(uint64_t));
  }
  return enqueue(stream, {operation});
}

int cuMemcpyHtoD_v2(Address destination, const void* source, size_t bytes) {
  if (const int code = cuStreamSynchronize(nullptr)) return code;
  if (!accessible(destination, bytes)) return kInvalidValue;
  std::memcpy(reinterpret_cast<void*>(destination), source, bytes);
  return kSuccess;
}

int cuMemcpyDtoH_v2(void* destination, Address source, size_t bytes) {
  if (const int code = cuStreamSynchronize(nullptr)) return code;
  if (!accessible(source, bytes)) return kInvalidValue;
  std::memcpy(destination, reinterpret_cast<const void*>(source), bytes);
  return kSuccess;
}

int cuEventCreate(Event* event, unsigned flags) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  if (flags != kNoTiming) return kInvalidValue;
  std::lock_guard<std::mutex> lock(mutex);
  auto* state = new EventState;
  events.insert(state);
  *event = state;
  return kSuccess;
}

int cuEventDestroy_v2(Event event) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  EventState* state = find_event(event);
  if (state == nullptr) return kHandleInvalid;
  std::lock_guard<std::mutex> lock(mutex);
  events.erase(state);
  delete state;
  return kSuccess;
}

int cuEventRecord(Event event, Stream stream) {
  if (const int code = enter(__func__, Needs::kContext)) return code;
  EventState* state = find_event(event);
  if (state == nullptr) return kHandleInvalid;
  state->point = std::make_shared<std::atomic<bool>>(false);
  Operation operation{Operation::Kind::kRecord};
  operation.point = state->point;
  const int result = enqueue(stream, {std::move(operation)});
  // What a broken wait should have held back has passed by the time that anybody asks.
  if (result == kSuccess && waits_are_broken()) run_empty(*find(stream));
  return result;
}

int cuEventQuery(Event event) {
  if (const int code = enter(__func__, Needs::kContextAndNoCapture)) return code;
  const EventState* state = find_event(event);
  if (state == nullptr) return kHandleInvalid;
  if (!state->point || *state->point) return kSuccess;
  return kNotReady;
}
}
