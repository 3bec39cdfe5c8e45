// Failures in the C APIs of the library: a status, and a text for the caller.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <initializer_list>

#include "trtconvert/status.h"

namespace trtconvert {

// Collects the first failure: a status and its text.
//
// The CUDA runtime keeps an error until the last error is read. Otherwise the next launch would read a reported failure and fail too,
// for example the call after an invalidated capture.
struct Report {
  char* message;
  size_t size;
  TrtConvertStatus status = TRTCONVERT_OK;

  Report(char* text, size_t bytes) : message(text), size(bytes) {
    if (message && size) message[0] = '\0';
  }

  static void forget() { cudaGetLastError(); }

  __attribute__((format(printf, 3, 4))) TrtConvertStatus fail(TrtConvertStatus code, const char* format, ...) {
    status = code;
    if (message && size) {
      va_list arguments;
      va_start(arguments, format);
      std::vsnprintf(message, size, format, arguments);
      va_end(arguments);
    }
    return code;
  }

  TrtConvertStatus invalid_int(const char* field, const char* expected, long long got) {
    return fail(TRTCONVERT_INVALID_ARGUMENT, "%s: expected %s, got %lld", field, expected, got);
  }

  TrtConvertStatus check_data_type(int32_t type) {
    if (type == TRTCONVERT_FLOAT16 || type == TRTCONVERT_BFLOAT16) return TRTCONVERT_OK;
    return invalid_int("data_type", "0 (float16) or 1 (bfloat16)", type);
  }

  TrtConvertStatus check_flag(const char* field, int32_t flag) {
    return flag == 0 || flag == 1 ? TRTCONVERT_OK : invalid_int(field, "0 or 1", flag);
  }

  TrtConvertStatus check_epsilon(float epsilon) {
    if (std::isfinite(epsilon) && epsilon >= 0) return TRTCONVERT_OK;
    return fail(TRTCONVERT_INVALID_ARGUMENT, "epsilon: expected a finite value >= 0, got %g", epsilon);
  }

  TrtConvertStatus check_pointer(const char* name, const void* pointer, size_t alignment) {
    if (!pointer) return fail(TRTCONVERT_INVALID_ARGUMENT, "%s: expected a device pointer, got null", name);
    if (reinterpret_cast<uintptr_t>(pointer) % alignment)
      return fail(TRTCONVERT_INVALID_ARGUMENT, "%s: expected a pointer aligned to %zu bytes, got %p", name, alignment, pointer);
    return TRTCONVERT_OK;
  }

  // Checks tensors that are accessed 16 bytes at once.
  struct Tensor {
    const char* name;
    const void* pointer;
    bool optional = false;
  };
  TrtConvertStatus check_tensors(std::initializer_list<Tensor> tensors) {
    for (const Tensor& tensor : tensors)
      if (!(tensor.optional && !tensor.pointer) && check_pointer(tensor.name, tensor.pointer, 16)) return status;
    return TRTCONVERT_OK;
  }

  TrtConvertStatus no_device(cudaError_t error) {
    forget();
    return fail(TRTCONVERT_CUDA_ERROR, "no usable CUDA device: %s", cudaGetErrorString(error));
  }

  // True if the caller's struct is the one that this library was built with.
  template <typename Params>
  TrtConvertStatus check_caller(const Params& params, uint32_t version, const char* header) {
    if (params.struct_size == sizeof(Params) && params.version == version) return TRTCONVERT_OK;
    return fail(TRTCONVERT_INVALID_ARGUMENT,
                "params: expected version %u of %zu bytes, got version %u of %u bytes; rebuild the caller with this library's %s",
                version, sizeof(Params), params.version, params.struct_size, header);
  }

  TrtConvertStatus launched(cudaError_t error, const char* kernel) {
    if (error == cudaSuccess) return TRTCONVERT_OK;
    forget();
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction)
      return fail(TRTCONVERT_UNSUPPORTED_DEVICE,
                  "device: this library was compiled for %s only; rebuild it with TRTCONVERT_CUDA_ARCHITECTURES",
                  TRTCONVERT_ARCHITECTURES);
    return fail(TRTCONVERT_CUDA_ERROR, "%s: %s: %s", kernel, cudaGetErrorName(error), cudaGetErrorString(error));
  }
};

}  // namespace trtconvert
