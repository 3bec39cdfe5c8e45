/* Types that the C APIs of the library share. */
#ifndef TRTCONVERT_STATUS_H_
#define TRTCONVERT_STATUS_H_

#if defined(__GNUC__)
#define TRTCONVERT_API __attribute__((visibility("default")))
#else
#define TRTCONVERT_API
#endif

typedef enum {
  TRTCONVERT_OK = 0,
  TRTCONVERT_INVALID_ARGUMENT = 1,     /* the message has the field, the expected and the given value */
  TRTCONVERT_UNSUPPORTED_DEVICE = 2,   /* older than sm_80, or not among the compiled architectures */
  TRTCONVERT_WORKSPACE_TOO_SMALL = 3,
  TRTCONVERT_CUDA_ERROR = 4,           /* the message carries CUDA's own error name */
} TrtConvertStatus;

typedef enum {
  TRTCONVERT_FLOAT16 = 0,
  TRTCONVERT_BFLOAT16 = 1,
  TRTCONVERT_FLOAT32 = 2, /* only where a field names it */
} TrtConvertDataType;

#endif /* TRTCONVERT_STATUS_H_ */
