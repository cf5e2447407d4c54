// Several operations as one Work.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

namespace pg_sdma {

class JointWork : public c10d::Work {
 public:
  // `works`: none null.
  explicit JointWork(std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : Work(-1, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(),
                       [](auto& work) { return work->isCompleted(); });
  }

  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(), [](auto& work) { return work->isSuccess(); });
  }

  bool wait(std::chrono::milliseconds timeout) override {
    bool completed = true;
    for (auto& work : works_) completed = work->wait(timeout) && completed;
    return completed;
  }

  void synchronize() override {
    for (auto& work : works_) work->synchronize();
  }

 protected:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

// The parts of one call on a device's tensors. What its future holds are the call's results, when
// the parts' futures are complete.
class JointCall final : public JointWork {
 public:
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
  // Called once, on a stream that is ordered behind all parts.
  using Results = std::function<c10::IValue()>;

  // `type`: of the results.
  JointCall(std::vector<c10::intrusive_ptr<c10d::Work>> works, c10::Device device,
            c10::TypePtr type, Results results);

  // Throws where a part has no future.
  FuturePtr getFuture() override;
  // As below.
  std::vector<at::Tensor> result() override;

 private:
  struct Parts;

  const c10::Device device_;
  const c10::TypePtr type_;
  const Results results_;
  std::once_flag asked_;
  FuturePtr future_;
};

// Results as Work::result() gives them. Throws where they are not one list of tensors.
std::vector<at::Tensor> tensors_of(const c10::IValue& results);
// Of a future, once it is complete; the current stream is ordered behind it. Throws what it threw.
std::vector<at::Tensor> tensors_of(c10::ivalue::Future& future);

}  // namespace pg_sdma
