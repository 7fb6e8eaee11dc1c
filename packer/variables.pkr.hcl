# SPDX-License-Identifier: Apache-2.0

variable "wheelhouse" {
  type        = string
  default     = "../build/wheelhouse"
  description = "Folder of wheels, see README.md."
}

variable "config_file" {
  type        = string
  default     = "../daemon/swansongd/swansong.example.toml"
  description = "Becomes /etc/swansong/swansong.toml in the image. Holds no secret."
}

# Empty: the value of config_file, and each VM sets its own on the first boot; see first-boot/.

variable "run_name" {
  type        = string
  default     = ""
  description = "Becomes run.name: only for an image that serves one run."
}

variable "store_url" {
  type        = string
  default     = ""
  description = "Becomes store.url, such as s3://bucket/prefix."
}

variable "metrics_listen" {
  type        = string
  default     = ""
  description = "Becomes metrics.listen, such as 0.0.0.0:9469 behind a firewall; empty: no metrics, or as in config_file."
}

variable "image_name" {
  type        = string
  default     = "swansong"
  description = "Name of the image; a time stamp is added."
}

# The default bases are plain Debian. For GPUs name an image that has drivers. If its Python is older than 3.11,
# provision.sh installs another one beside it.

variable "aws_region" {
  type    = string
  default = "us-east-1"
}

variable "aws_subnet" {
  type        = string
  default     = ""
  description = "Subnet of the build VM, with a route to the package indexes; empty: the default VPC."
}

variable "aws_instance_type" {
  type        = string
  default     = "t3.small"
  description = "Of the build VM; needs no GPU."
}

variable "aws_disk_gb" {
  type        = number
  default     = 0
  description = "Root disk of the image; 0: the size of the base image."
}

variable "aws_root_device" {
  type        = string
  default     = "/dev/xvda"
  description = "Name of the base image's root device, for aws_disk_gb: /dev/xvda on Debian and Amazon Linux, /dev/sda1 on Ubuntu."
}

variable "aws_encrypt" {
  type        = bool
  default     = true
  description = "Encrypt the image; VMs of other accounts then need the key as well."
}

variable "aws_kms_key" {
  type        = string
  default     = ""
  description = "Key of the encryption; empty: the account's own key for EBS."
}

variable "aws_source_image" {
  type        = string
  default     = "debian-12-amd64-*"
  description = "Name pattern of the base image; the newest that matches is taken."
}

variable "aws_source_owner" {
  type        = string
  default     = "136693071363" # Debian
  description = "Account that publishes the base image."
}

variable "aws_ssh_username" {
  type    = string
  default = "admin"
}

variable "gcp_project" {
  type        = string
  default     = ""
  description = "Project of the image."
}

variable "gcp_zone" {
  type    = string
  default = "us-central1-a"
}

variable "gcp_subnetwork" {
  type        = string
  default     = ""
  description = "Subnetwork of the build VM, in the region of gcp_zone; empty: the default network."
}

variable "gcp_machine_type" {
  type    = string
  default = "e2-small"
}

variable "gcp_disk_gb" {
  type        = number
  default     = 20
  description = "Boot disk of the image; at least the size of the base image."
}

variable "gcp_disk_type" {
  type        = string
  default     = "pd-balanced"
  description = "Type of the build VM's boot disk."
}

variable "gcp_iap" {
  type        = bool
  default     = false
  description = "Reach the build VM through Identity-Aware Proxy, without an external address; needs gcloud and outgoing access."
}

variable "gcp_source_family" {
  type        = string
  default     = "debian-12"
  description = "Family of the base image; its newest is taken."
}

variable "gcp_source_project" {
  type    = string
  default = "debian-cloud"
}
