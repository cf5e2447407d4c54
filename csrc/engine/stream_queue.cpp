#include "engine/stream_queue.h"

#include <chrono>
#include <thread>
#include <utility>

#include "engine/driver_manners.h"
#include "engine/events.h"

namespace pg_sdma {
namespace {

// cuStreamBatchMemOp takes fewer than 256. Nothing here counts what is enqueued: behind a wait that
// is not over, the driver's call blocks once about a thousand entries are queued, and goes on when
// the peers get there.
constexpr size_t kMostOperations = 255;

constexpr std::chrono::seconds kDrainPatience{2};

// By either of its handles: null, and CU_STREAM_LEGACY.
bool is_default(driver::Stream stream) { return reinterpret_cast<uintptr_t>(stream) <= 1; }

}  // namespace

StreamQueue::StreamQueue(std::shared_ptr<const DriverDevice> device, void* page, size_t bytes)
    : device_(std::move(device)),
      events_(std::make_shared<EventPool>(device_)),
      page_(page),
      bytes_(bytes) {
  const driver::Library& library = *device_->library;
  const auto current = device_->enter();
  const driver::RelaxedCapture relaxed(library);
  device_->must(library.register_host, page_, bytes_, driver::kPortable | driver::kDeviceMapped);
  try {
    device_->must(library.host_device_address, &page_on_device_, page_, 0);
    stream_ = at_ = own_ = make_stream();
    branches_.resize(device_->copy_streams);
  } catch (...) {
    library.unregister_host(page_);
    throw;
  }
}

StreamQueue::~StreamQueue() {
  const driver::Library& library = *device_->library;
  // A wait that never ends would hold the unregistering too: then the page's memory stays pinned
  // and the stream stays, which is all that a broken group can leave to its process's end.
  if (!drained()) return;
  const auto current = device_->enter();
  const driver::RelaxedCapture relaxed(library);
  library.destroy_stream(own_);
  if (side_ != nullptr) library.destroy_stream(side_);
  if (batches_ != nullptr) library.destroy_stream(batches_);
  for (const Branch& branch : branches_) {
    if (branch.stream != nullptr) library.destroy_stream(branch.stream);
  }
  library.unregister_host(page_);
}

// The other streams by themselves: a program that failed half-way has not joined them.
bool StreamQueue::drained() {
  try {
    std::vector<std::shared_ptr<Marker>> lasts{mark()};
    {
      const auto current = device_->enter();
      const driver::RelaxedCapture relaxed(*device_->library);
      const auto add = [&](driver::Stream stream) {
        if (stream == nullptr) return;
        lasts.push_back(std::make_shared<EventMarker>(events_, events_->record(stream)));
      };
      add(side_);
      add(batches_);
      for (const Branch& branch : branches_) add(branch.stream);
    }
    const auto deadline = std::chrono::steady_clock::now() + kDrainPatience;
    for (const auto& last : lasts) {
      while (!last->passed()) {
        if (std::chrono::steady_clock::now() > deadline) return false;
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
    return true;
  } catch (const driver::Failure&) {
    return false;  // the driver was shut down before us, or the device has failed
  }
}

void StreamQueue::follow_caller() {
  use(own_);
  wait_for(device_->current_stream());
}

void StreamQueue::follow(void* stream) {
  const auto current = device_->enter();
  if (!device_->records(stream, /*unasked=*/false)) wait_for(stream);
}

void StreamQueue::wait_for(driver::Stream stream) {
  const auto current = device_->enter();
  const driver::RelaxedCapture relaxed(*device_->library);
  device_->must(device_->library->wait_event, stream_, events_->record(stream).get(), 0);
}

bool StreamQueue::caller_records() const {
  const auto current = device_->enter();
  return device_->records(device_->current_stream(), /*unasked=*/false);
}

void StreamQueue::use_callers_stream() { use(device_->current_stream()); }

void StreamQueue::use(driver::Stream stream) {
  if (stream == stream_) return;
  const auto current = device_->enter();
  const driver::RelaxedCapture relaxed(*device_->library);
  std::shared_ptr<void> before = end();
  device_->must(device_->library->wait_event, stream, before.get(), 0);
  stream_ = at_ = stream;
  end_ = std::move(before);
}

// A caller's stream may hold more than programs by the time that somebody asks, and the stream
// may be gone; unless a program failed half-way.
std::shared_ptr<void> StreamQueue::end() const {
  return stream_ == own_ || !end_ ? events_->record(stream_) : end_;
}

void StreamQueue::run(const Program& program, Waiter&) {
  const driver::Library& library = *device_->library;
  const auto current = device_->enter();
  const driver::RelaxedCapture relaxed(library);
  end_.reset();
  try {
    enqueue(program);
  } catch (...) {
    forget_noted();
    throw;
  }
  if (stream_ != own_) end_ = events_->record(stream_);
}

void StreamQueue::enqueue(const Program& program) {
  for (const Step& step : program) {
    if (step.track != track_) turn_to(step.track);
    switch (step.kind) {
      case Step::Kind::kCopy:
        flush();
        note_copy(step);
        break;
      case Step::Kind::kWait:
      case Step::Kind::kWrite:
        flush_copies();
        note(step);
        break;
      default:
        flush();
        flush_copies();
        enqueue_on_side(step);
    }
  }
  flush();
  flush_copies();
  if (track_ != 0) turn_to(0);
  join(branches_.back());
}

// Of a program that failed half-way: the next one begins anew, and joins what this one did not.
void StreamQueue::forget_noted() {
  operations_.clear();
  destinations_.clear();
  sources_.clear();
  sizes_.clear();
  for (Branch& branch : branches_) branch.forked = false;
  fork_.reset();
  track_ = 0;
  at_ = stream_;
}

driver::Stream StreamQueue::make_stream() {
  const driver::Library& library = *device_->library;
  int least = 0;
  int greatest = 0;
  driver::Stream made = nullptr;
  device_->must(library.priority_range, &least, &greatest);
  device_->must(library.create_stream, &made, driver::kNonBlocking, greatest);
  return made;
}

StreamQueue::Branch* StreamQueue::branch_of(uint32_t track) {
  if (track == 0) return nullptr;
  if (track == Step::kBeside) return &branches_.back();
  const size_t number = (track - 1) % branches_.size();
  return number == 0 ? nullptr : &branches_[number - 1];
}

// Every wait is for something enqueued before it, as on the side.
void StreamQueue::turn_to(uint32_t track) {
  Branch* const branch = branch_of(track);
  const bool spreads = track == Step::kBeside || (track != 0 && branches_.size() > 1);
  const bool forks = spreads && !fork_;
  const bool joins = track == 0 && fork_;
  track_ = track;
  if (!forks && !joins && at_ == (branch == nullptr ? stream_ : branch->stream)) return;
  flush();
  flush_copies();
  const driver::Library& library = *device_->library;
  at_ = stream_;
  if (joins) {
    for (Branch& each : branches_) {
      each.forked = false;
      if (&each != &branches_.back()) join(each);
    }
    fork_.reset();
  }
  if (forks) fork_ = events_->record(stream_);
  if (branch == nullptr) return;
  at_ = stream_of(*branch);
  if (!branch->forked) device_->must(library.wait_event, at_, fork_.get(), 0);
  branch->forked = true;
  branch->joined = false;
}

void StreamQueue::join(Branch& branch) {
  if (branch.joined) return;
  device_->must(device_->library->wait_event, stream_, events_->record(branch.stream).get(), 0);
  branch.joined = true;
}

driver::Stream StreamQueue::stream_of(Branch& branch) {
  if (branch.stream == nullptr) branch.stream = make_stream();
  return branch.stream;
}

// Every wait is for something enqueued before it: all of it may share one hardware queue.
void StreamQueue::enqueue_on_side(const Step& step) {
  const driver::Library& library = *device_->library;
  if (side_ == nullptr) side_ = make_stream();
  switch (step.kind) {
    case Step::Kind::kFork:
      device_->must(library.wait_event, side_, events_->record(stream_).get(), 0);
      break;
    case Step::Kind::kMark:
      if (step.value >= marks_.size()) marks_.resize(step.value + 1);
      marks_[step.value] = events_->record(side_);
      break;
    case Step::Kind::kJoin:
      device_->must(library.wait_event, stream_, marks_.at(step.value).get(), 0);
      break;
    default: {
      Launch launch = *step.launch;
      std::array<void*, std::tuple_size_v<decltype(launch.arguments)>> arguments;
      for (size_t i = 0; i < arguments.size(); ++i) arguments[i] = &launch.arguments[i];
      device_->must(library.launch_kernel, launch.function, launch.blocks, 1, 1, launch.threads, 1,
                    1, launch.shared_bytes, side_, arguments.data(), nullptr);
    }
  }
}

void StreamQueue::caller_follows() {
  if (device_->current_stream() != stream_) mark()->caller_follows();
}

std::shared_ptr<Queue::Marker> StreamQueue::mark() {
  const auto current = device_->enter();
  const driver::RelaxedCapture relaxed(*device_->library);
  return std::make_shared<EventMarker>(events_, end());
}

std::shared_ptr<Queue::Marker> StreamQueue::mark_caller() {
  const auto current = device_->enter();
  const driver::RelaxedCapture relaxed(*device_->library);
  return std::make_shared<EventMarker>(events_, events_->record(device_->current_stream()));
}

void StreamQueue::note(const Step& step) {
  const auto offset =
      reinterpret_cast<uintptr_t>(step.counter) - reinterpret_cast<uintptr_t>(page_);
  driver::MemoryOperation operation;
  operation.address = page_on_device_ + offset;
  operation.value = step.value;
  if (step.kind == Step::Kind::kWait) {
    operation.operation = driver::kWaitValue64;
    operation.flags = driver::kWaitAtLeast;
  } else {
    operation.operation = driver::kWriteValue64;
    operation.flags = driver::kWriteWithBarrier;
  }
  operations_.push_back(operation);
  if (operations_.size() == kMostOperations) flush();
}

void StreamQueue::flush() {
  if (!operations_.empty()) driver::enqueue(*device_, at_, operations_);
}

void StreamQueue::note_copy(const Step& step) {
  destinations_.push_back(reinterpret_cast<driver::Address>(step.destination));
  sources_.push_back(step.source);
  sizes_.push_back(step.bytes);
}

void StreamQueue::flush_copies() {
  if (device_->library->copy_batch.function != nullptr && sizes_.size() > 1) {
    enqueue_batch();
  } else {
    for (size_t i = 0; i < sizes_.size(); ++i) {
      driver::copy(*device_, destinations_[i], sources_[i], sizes_[i], at_);
    }
  }
  destinations_.clear();
  sources_.clear();
  sizes_.clear();
}

// The copies of a batch are not ordered among themselves, and need not be.
void StreamQueue::enqueue_batch() {
  const driver::Library& library = *device_->library;
  // The default stream takes none. Not by a branch, where they would wait for the own shard's
  // copies.
  if (is_default(at_) && batches_ == nullptr) batches_ = make_stream();
  const driver::Stream stream = is_default(at_) ? batches_ : at_;
  if (stream != at_) device_->must(library.wait_event, stream, events_->record(at_).get(), 0);
  driver::CopyAttributes attributes;
  attributes.source_order = driver::kInStreamOrder;
  size_t first = 0;
  size_t failed = 0;
  device_->must(library.copy_batch, destinations_.data(), sources_.data(), sizes_.data(),
                sizes_.size(), &attributes, &first, 1, &failed, stream);
  if (stream != at_) device_->must(library.wait_event, at_, events_->record(stream).get(), 0);
}

}  // namespace pg_sdma
