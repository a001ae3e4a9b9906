// Lets PyTorch without CUDA make fake tensors on a CUDA device.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>
namespace {
using Guard = c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}  // namespace
