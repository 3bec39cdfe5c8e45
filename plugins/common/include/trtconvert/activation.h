/* Activations behind a linear layer. */
#ifndef TRTCONVERT_ACTIVATION_H_
#define TRTCONVERT_ACTIVATION_H_

/* GELU(z) = z Phi(z), exact to 4e-7, or the approximation by a hyperbolic tangent (Hendrycks and Gimpel 2016, arXiv:1606.08415). */
typedef enum {
  TRTCONVERT_NO_ACTIVATION = 0,
  TRTCONVERT_GEGLU = 1,     /* of two layers, the gate's behind the other */
  TRTCONVERT_GELU = 2,
  TRTCONVERT_GELU_TANH = 3,
} TrtConvertActivation;

#endif /* TRTCONVERT_ACTIVATION_H_ */
