#include "python_all_gather.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "backend/order/stream_work.h"

namespace pg_sdma {
namespace {

// Runs `body` with the GIL. What it throws leaves without anything that belongs to Python, which
// must not be dropped without the GIL.
template <class Body>
auto with_python(const Body& body) {
  py::gil_scoped_acquire gil;
  try {
    return body();
  } catch (const py::error_already_set& error) {
    throw std::runtime_error(py::str(error.value()).cast<std::string>());
  } catch (const std::exception& error) {
    throw std::runtime_error(error.what());
  }
}

at::Tensor bytes_at(const void* data, std::vector<int64_t> sizes, c10::Device device) {
  return at::for_blob(const_cast<void*>(data), sizes)
      .options(at::dtype(at::kByte).device(device))
      .target_device(device)
      .make_tensor();
}

// A MoriGather.
class PythonAllGather final : public ExternalAllGather {
 public:
  // With the GIL held.
  PythonAllGather(py::object gather, c10::Device device)
      : gather_(std::move(gather)),
        name_(gather_.attr("name").cast<std::string>()),
        device_(device) {
    const py::object stream = gather_.attr("stream");
    if (stream.is_none()) return;
    const auto id = stream.attr("stream_id").cast<int64_t>();
    stream_ = c10::Stream(c10::Stream::UNSAFE, device, id);
  }

  // Never dropped: it frees memory that the peers' copy engines know, and this process has no
  // second time with mori. It may also be too late to ask for the GIL.
  ~PythonAllGather() override { gather_.release(); }

  std::string name() const override { return name_; }

  void enqueue(const Call& call, Queue& queue) override {
    c10::OptionalDeviceGuard on_device;
    std::optional<c10::impl::VirtualGuardImpl> guard;
    std::optional<StreamGuard> on_stream;
    if (stream_) {
      on_device.reset_device(device_);
      guard.emplace(device_.type());
      on_stream.emplace(*guard, *stream_);
    }
    queue.caller_follows();
    with_python([&] {
      for (const Piece& piece : call.pieces) {
        if (piece.bytes > 0) gather(piece);
      }
    });
    if (stream_) queue.follow(stream_->native_handle());
  }

 private:
  void gather(const Piece& piece) {
    const auto bytes = static_cast<int64_t>(piece.bytes);
    const auto world = static_cast<int64_t>(piece.outputs.size());
    const at::Tensor input = bytes_at(piece.input, {bytes}, device_);
    const auto* first = static_cast<const char*>(piece.outputs[0]);
    bool one_block = true;
    for (int64_t r = 0; r < world; ++r) one_block &= piece.outputs[r] == first + r * bytes;
    if (one_block) {
      gather_.attr("gather")(input, bytes_at(first, {world, bytes}, device_));
      return;
    }
    std::vector<at::Tensor> outputs;
    for (void* output : piece.outputs) outputs.push_back(bytes_at(output, {bytes}, device_));
    gather_.attr("gather")(input, outputs);
  }

  py::object gather_;
  const std::string name_;
  const c10::Device device_;
  std::optional<c10::Stream> stream_;
};

class PythonOffer final : public ExternalOffer {
 public:
  PythonOffer(py::object offer, c10::Device device) : offer_(std::move(offer)), device_(device) {}
  ~PythonOffer() override {
    py::gil_scoped_acquire gil;
    offer_ = py::object();
  }

  std::string prepare() override {
    return with_python([&] { return offer_.attr("prepare")().cast<std::string>(); });
  }

  std::unique_ptr<ExternalAllGather> join(const std::string& word) override {
    return with_python([&]() -> std::unique_ptr<ExternalAllGather> {
      return std::make_unique<PythonAllGather>(offer_.attr("join")(word), device_);
    });
  }

 private:
  py::object offer_;
  const c10::Device device_;
};

}  // namespace

std::shared_ptr<ExternalOffer> python_offer(const py::object& offer, c10::Device device) {
  return std::make_shared<PythonOffer>(offer, device);
}

}  // namespace pg_sdma
